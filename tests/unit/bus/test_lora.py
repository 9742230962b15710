"""Names of adapters, and what an engine gets before their tensors."""

from __future__ import annotations

import pytest

from bus._lora import MAX_CONFIG_BYTES, AdapterInit, adapter_backend, adapter_of
from bus._weight_transfer.formats import decode, encode
from bus.errors import UsageError


def test_a_backend_for_each_adapter() -> None:
    assert adapter_backend("policy-lora") == "lora:policy-lora"
    assert adapter_of("lora:policy-lora") == "policy-lora"
    assert [adapter_of(backend) for backend in ("shm", "vllm:nccl", "lora")] == ["", "", ""]


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a:b", "../a", "a b", "a\n", "é", "a" * 129])
def test_a_name_that_is_malformed(name: str) -> None:
    with pytest.raises(UsageError, match="adapter="):
        adapter_backend(name)


def test_what_an_engine_gets_goes_there_and_back() -> None:
    init = AdapterInit("gloo", b"\0params", b"{}")
    assert decode(encode(init), AdapterInit) == init


@pytest.mark.parametrize(
    ("init", "field"),
    [
        (AdapterInit("", b"", b"{}"), "backend"),
        (AdapterInit("b" * 65, b"", b"{}"), "backend"),
        (AdapterInit("shm", b"", b" " * (MAX_CONFIG_BYTES + 1)), "config"),
    ],
)
def test_what_an_engine_refuses(init: AdapterInit, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        decode(encode(init), AdapterInit)
