"""An adapter that comes in: its config, its tensors chunk by chunk, and what it can't be."""

from __future__ import annotations

import pytest
import torch

from bus._lora import AdapterInit
from bus._weight_transfer.formats import encode
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._transfer.lora import IncomingAdapter


def params(config: bytes = b'{"r": 2}') -> bytes:
    return encode(AdapterInit("gloo", b"there", config))


def test_tensors_are_kept_whatever_becomes_of_the_buffers() -> None:
    """Those of all chunks, until they are taken."""
    adapter = IncomingAdapter("mine", params())
    assert (adapter.config, adapter.backend, adapter.params) == ({"r": 2}, "gloo", b"there")
    buffer = torch.ones(2)
    for name in ("a", "b"):
        adapter.add([(name, buffer)])
        buffer.zero_()
    taken = adapter.take()
    assert {name: tensor.tolist() for name, tensor in taken.items()} == {
        "a": [1.0, 1.0],
        "b": [0.0, 0.0],
    }
    assert adapter.take() == {}


def test_an_update_that_failed_leaves_nothing_in_the_next() -> None:
    adapter = IncomingAdapter("mine", params())
    adapter.add([("lost", torch.ones(1))])
    adapter.begin()
    adapter.add([("a", torch.ones(1))])
    assert list(adapter.take()) == ["a"]


@pytest.mark.parametrize(
    ("name", "blob", "code", "text"),
    [
        ("a/b", params(), NackCode.MALFORMED, "adapter='a/b'"),
        ("mine", b"", NackCode.TRANSFER_FAILED, "AdapterInit"),
        ("mine", params(b"{"), NackCode.TRANSFER_FAILED, "config of adapter mine"),
        ("mine", params(b"[]"), NackCode.TRANSFER_FAILED, "not a JSON object"),
    ],
)
def test_what_is_no_adapter_is_refused_when_it_is_opened(
    name: str, blob: bytes, code: NackCode, text: str
) -> None:
    with pytest.raises(EngineError, match=text) as refused:
        IncomingAdapter(name, blob)
    assert refused.value.code is code
