"""Pickled CUDA IPC handles are read as vLLM and SkyRL write them, and no other pickle is."""

from __future__ import annotations

import base64
import collections
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from bus._vllm.payloads import IpcTensor
from bus.errors import UsageError
from sidecar._vllm.plugin.worker.native_handles import rebuildable
from tests.support.ipc_handles import handle
from trainer_agent._gateway.pickled_handles import read_handles, read_info

GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


def sent(found: object, protocol: int | None = None) -> str:
    """As vLLM's and SkyRL's clients send it."""
    return base64.b64encode(pickle.dumps(found, protocol=protocol)).decode()


def raw(*instructions: bytes) -> str:
    return base64.b64encode(b"\x80\x04" + b"".join(instructions) + b".").decode()


def with_field(index: int, value: object) -> tuple[Any, ...]:
    fields = list(handle(0))
    fields[index] = value
    return tuple(fields)


class Runs:
    """Calls something, if it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("storage", [torch.storage.TypedStorage, torch.storage.UntypedStorage])
def test_what_arrives_is_what_pytorch_rebuilds_from(
    protocol: int, dtype: torch.dtype, storage: type
) -> None:
    """One dict for a packed buffer, or a list with one for each tensor."""
    fields = with_field(5, dtype)
    of_storage = (*fields[:4], storage, *fields[5:])
    rebuilt = (*fields[:4], torch.storage.TypedStorage, *fields[5:])
    packed = read_handles(sent({GPU: of_storage, "GPU-2": of_storage}, protocol))
    assert rebuildable(packed) == {GPU: rebuilt, "GPU-2": rebuilt}
    each = read_handles(sent([{GPU: of_storage}] * 3, protocol))
    assert rebuildable(each) == [{GPU: rebuilt}] * 3


def test_many_tensors_are_many_handles() -> None:
    """Their texts and classes are written once, and referred to."""
    found = read_handles(sent([{GPU: handle(index)} for index in range(1000)]))
    assert [each[GPU].device for each in found if isinstance(each, dict)] == list(range(1000))


def test_a_parameter_and_missing_handles_are_taken() -> None:
    fields = list(with_field(0, torch.nn.Parameter))
    fields[7] = fields[11] = fields[13] = None
    [found] = read_handles(sent([{GPU: tuple(fields)}]))
    assert isinstance(found, dict)
    assert (found[GPU].handle, found[GPU].counter, found[GPU].event) == (b"", b"", b"")


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch {0}"),
        (eval, "open({0!r}, 'w')"),
        (Path.touch, Path("{0}")),
        (torch.load, "{0}"),
        (torch.Tensor, 1 << 40),
        (torch.storage.UntypedStorage, 1 << 50),
        (torch.Size, [1 << 60] * 17),
        (bytearray, 1 << 40),
        (collections.OrderedDict,),
    ],
    ids=lambda call: str(getattr(call[0], "__name__", "")),
)
def test_a_pickle_that_calls_something_is_refused_and_not_run(
    call: tuple[Any, ...], tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    named = [
        type(each)(str(each).format(str(mark))) if isinstance(each, str | Path) else each
        for each in call
    ]
    for place in (Runs(*named), {GPU: Runs(*named)}, [{GPU: with_field(1, Runs(*named))}]):
        with pytest.raises(UsageError, match="ipc_handles_pickled"):
            read_handles(sent(place))
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        "no base64!",
        base64.b64encode(b"no pickle").decode(),
        raw(b"\x8c\x05torch\x8c\x06Tensor\x93)R"),  # a call of the tensors' class
        raw(b"\x8c\x05torch\x8c\x06Tensor\x93)\x81"),  # __new__
        raw(b"\x8c\x05torch\x8c\x04Size\x93}\x8c\x01ab"),  # sets an attribute
        raw(b"\x8c\x05torch\x8c\x04load\x93"),
        raw(b"\x8c\x02os\x8c\x06system\x93"),
        raw(b"cos\nsystem\n"),
        raw(b"(ios\nsystem\n"),
        raw(b"\x82\x01"),  # a registered extension
        raw(b"Pid\n"),  # a persistent id
        raw(b"}r\xff\xff\xff\xff"),  # room for four billion objects
        raw(b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f"),  # a bytearray of 8 EiB
        raw(b"\x8b\xff\xff\xff\x7f"),  # an integer of 2 GiB
        raw(b"("),
        raw(b"R"),
        raw(b""),
        # Python itself writes protocol 4 or later: the instructions of earlier ones reserve memory.
        sent({GPU: handle(0)}, 2),
        sent({GPU: handle(0)}, 3),
        sent(handle(0)),
        sent([handle(0)]),
        sent({7: handle(0)}),
        sent({GPU: handle(0)[:-1]}),
        sent({GPU: list(handle(0))}),
        sent({GPU: with_field(0, "torch.nn.Module")}),
        sent({GPU: with_field(1, (1,) * 17)}),
        sent({GPU: with_field(1, (-1,))}),
        sent({GPU: with_field(5, torch.storage.TypedStorage)}),
        sent({GPU: with_field(5, torch.complex64)}),
        sent({GPU: with_field(6, True)}),
        sent({GPU: with_field(7, b"h" * 70_000)}),
        sent({GPU: with_field(8, 1 << 80)}),
        sent({GPU: with_field(2, (1 << 64, 1))}),
        sent([{GPU: handle(0)}] * 70_000),
    ],
)
def test_what_is_no_handle_is_refused(text: object) -> None:
    with pytest.raises(UsageError, match="ipc_handles_pickled"):
        read_handles(text)


def test_pickles_are_read_only_where_that_is_allowed() -> None:
    info = {"names": ["a"], "ipc_handles_pickled": sent({GPU: handle(0)})}
    with pytest.raises(UsageError, match="--allow-pickled-handles"):
        read_info(info, allowed=False)
    found = read_info(info, allowed=True)
    assert found.keys() == {"names", "ipc_handles"}
    assert isinstance(found["ipc_handles"][GPU], IpcTensor)
    with pytest.raises(UsageError, match="not both"):
        read_info(info | {"ipc_handles": []}, allowed=True)
    plain = {"names": ["a"]}
    assert read_info(plain | {"ipc_handles_pickled": None}, allowed=False) == plain
