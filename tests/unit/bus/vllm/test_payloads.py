"""What vLLM's own engines tell each other, as blobs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bus._vllm import payloads as vllm_payloads
from bus.messages.types import MAX_BLOB_BYTES

IPC = vllm_payloads.IpcTensor(
    size=(2, 3),
    stride=(3, 1),
    offset=0,
    dtype="bfloat16",
    device=1,
    handle=b"h" * 66,
    storage_bytes=12,
    storage_offset_bytes=512,
    requires_grad=False,
    counter=b"/torch_1",
    counter_offset=4,
    event=b"e" * 64,
    event_sync=True,
)
INFO = {
    "master_address": "10.0.0.1",
    "master_port": 29_500,
    "packed": True,
    "nothing": None,
    "share": 0.5,
    "raw": b"\x00\xff",
    "nested": [{"a": [1, -2]}, "text"],
    "ipc_handles": [{"GPU-1": IPC}],
}


def test_an_info_comes_back_as_it_went() -> None:
    """Handles as handles."""
    assert vllm_payloads.decode_info(vllm_payloads.encode_info(INFO)) == INFO


def test_a_chunk_gets_back_what_its_meta_says() -> None:
    """Only the columns that stood in it."""
    told = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
    blob = vllm_payloads.encode_chunk(["names", "shapes"], {"sizes": [24]})
    assert vllm_payloads.decode_chunk(blob, told) == {
        "names": ["a"],
        "shapes": [[2, 3]],
        "sizes": [24],
    }
    with pytest.raises(ValueError, match="unknown columns more"):
        vllm_payloads.decode_chunk(vllm_payloads.encode_chunk(["more"], {}), told)


class Clever(int):
    """Would lose on the way what it is."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "key: a object"),
        (Clever(1), "key: a Clever"),
        ([1, {"deep": {1, 2}}], r"key\[1\].deep: a set"),
        ({1: 2}, "key: a key is int"),
        ([[[[[[[[[[]]]]]]]]]], "nested deeper"),
        (b"0" * (MAX_BLOB_BYTES + 1), "at most"),
    ],
)
def test_what_has_no_plain_form_is_refused_by_its_place(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        vllm_payloads.encode_info({"key": value})


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({1: 2}),
        msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(7, b"")}),
        msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(1, b"\x80")}),
        msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(-1, b"\x00\x00\x00\x01")}),
    ],
)
def test_other_blobs_are_refused(blob: bytes) -> None:
    """Broken, of another kind, with extensions that are not ours."""
    with pytest.raises(ValueError, match=r"."):
        vllm_payloads.decode_info(blob)


def test_names() -> None:
    assert vllm_payloads.native_name("nccl") == "vllm:nccl"
    assert vllm_payloads.engine_of("vllm:nccl") == "nccl"
    assert vllm_payloads.engine_of("nccl") == ""
    assert vllm_payloads.is_loaded_on_receipt("vllm:ipc")
    assert not vllm_payloads.is_loaded_on_receipt("gloo")
    assert vllm_payloads.is_patching("vllm:sparse_nccl")
    assert not any(map(vllm_payloads.is_patching, ("sparse_nccl", "vllm:nccl", "gloo")))
