"""Folders of safetensors: what the library writes is read; what changes meanwhile is refused."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from bus.errors import UsageError
from trainer_agent._gateway.folder import FolderSource, read_adapter
from trainer_agent._gateway.http_update import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TENSORS = {
    "bias": torch.arange(3, dtype=torch.float64),
    "embed": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "flags": torch.tensor([True, False]),
    "none": torch.empty(0, 4, dtype=torch.float16),
    "one": torch.tensor(7, dtype=torch.int64),
    "packed": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "proj": torch.randn(64, 1024),
}


def test_what_safetensors_has_written_is_read(tmp_path: Path) -> None:
    for place in range(2):
        half = dict(list(TENSORS.items())[place::2])
        save_file(half, tmp_path / f"model-{place}.safetensors", metadata={"format": "pt"})
    source = FolderSource(str(tmp_path))
    read = dict(source)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype is tensor.dtype
        assert torch.equal(read[name].double(), tensor.double())
    assert [(meta.name, meta.shape) for meta in source.metadata()] == [
        (name, tuple(tensor.shape)) for name, tensor in read.items()
    ]
    assert {meta.name: meta.dtype for meta in source.metadata()}["packed"] == "float8_e4m3fn"


def cut_off(file: Path) -> None:
    os.truncate(file, 300)


def written_again(file: Path) -> None:
    """In place, by as many bytes."""
    data = file.read_bytes()
    before = file.stat().st_mtime_ns
    while file.stat().st_mtime_ns == before:  # the clock of a file system ticks some times a second
        file.write_bytes(data)


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize("change", [cut_off, written_again, replaced, os.unlink])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """A file that was mapped, and is cut off, would kill the process."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    tensors = iter(FolderSource(str(tmp_path)))
    next(tensors)
    change(tmp_path / "model.safetensors")
    with pytest.raises(Conflict, match=r"model\.safetensors"):
        list(tensors)


def test_a_file_that_changes_when_it_has_been_read_is_refused_too(tmp_path: Path) -> None:
    """Who writes a folder again, writes one file after the other: half of them may be new."""
    for place in range(2):
        save_file(TENSORS, tmp_path / f"{place}.safetensors")
    tensors = iter(FolderSource(str(tmp_path)))
    for _ in range(len(TENSORS) + 1):
        next(tensors)
    written_again(tmp_path / "0.safetensors")
    given = len(TENSORS) + 1
    with pytest.raises(Conflict, match=r"0\.safetensors changed"):
        for given, _ in enumerate(tensors, len(TENSORS) + 2):  # noqa: B007
            pass
    assert given < 2 * len(TENSORS)  # whoever counts tensors is refused, too


def head_of(**tensors: Any) -> bytes:
    head = json.dumps(tensors).encode()
    return struct.pack("<Q", len(head)) + head + bytes(64)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        head_of(w={"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}),
        head_of(w={"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}),
        head_of(w={"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}),
        head_of(w={"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}),
        head_of(w={"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}),
        head_of(w={"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}),
        head_of(w=None),
    ],
)
def test_what_is_no_safetensors_file_is_refused_by_its_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    (tmp_path / "adapter_config.json").write_text("{}")
    for read in (FolderSource, read_adapter):
        with pytest.raises(UsageError, match=r"adapter_model\.safetensors"):
            read(str(tmp_path))
