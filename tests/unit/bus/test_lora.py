"""Names of adapters, and of the folders that they travel in."""

from __future__ import annotations

import pytest

from bus.errors import UsageError
from bus.lora import AdapterFolder, adapter_backend, adapter_of
from bus.weight_transfer.formats import decode, encode

DIGEST = "0" * 64


def test_a_backend_for_each_adapter() -> None:
    assert adapter_backend("policy-lora") == "lora:policy-lora"
    assert adapter_of("lora:policy-lora") == "policy-lora"
    assert [adapter_of(backend) for backend in ("shm", "vllm:nccl", "lora")] == ["", "", ""]


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a:b", "../a", "a b", "a\n", "é", "a" * 129])
def test_a_name_that_is_malformed(name: str) -> None:
    with pytest.raises(UsageError, match="adapter="):
        adapter_backend(name)


def test_a_handle_goes_there_and_back() -> None:
    folder = AdapterFolder("wavebus-lora-ab_12", DIGEST)
    assert decode(encode(folder), AdapterFolder) == folder


@pytest.mark.parametrize(
    ("folder", "digest", "field"),
    [
        ("wavebus-12", DIGEST, "folder"),
        ("wavebus-lora-../x", DIGEST, "folder"),
        ("wavebus-lora-a/b", DIGEST, "folder"),
        ("wavebus-lora-" + "a" * 120, DIGEST, "folder"),
        ("wavebus-lora-a", "0" * 63, "config_sha256"),
        ("wavebus-lora-a", "G" * 64, "config_sha256"),
    ],
)
def test_a_handle_that_leads_elsewhere(folder: str, digest: str, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        decode(encode(AdapterFolder(folder, digest)), AdapterFolder)
