"""Reads weights and LoRA adapters from folders on the gateway's host."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from bus._manifest import TensorMeta
from bus.errors import UsageError
from trainer_agent._gateway.http_update import Conflict, Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_ADAPTER: Final = ("adapter_config.json", "adapter_model.safetensors")
_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


_LENGTH_BYTES: Final = 8  # size of the head's length, which precedes the head
_MAX_HEAD_BYTES: Final = 100_000_000  # the format's own limit


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor's entry in a file's head; ``data_offsets`` count from the end of the head."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _File:
    """Reads the tensors of a safetensors file.

    The file is not mapped into memory, because truncating a mapped file kills its readers.
    The format: https://github.com/huggingface/safetensors, section Format.

    Raises:
        UsageError: the file can't be read, is no safetensors file, or has an unsupported dtype.
    """

    def __init__(self, path: Path) -> None:
        if not _is_file(path):
            raise UsageError(f"{path}: the gateway's host has no such file")
        self._path = path
        try:
            self._state = _state_of(path)
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                head = file.read(length) if length <= _MAX_HEAD_BYTES else b""
            fields = msgspec.json.decode(head, type=dict[str, Any])
            fields.pop("__metadata__", None)
            tensors = msgspec.convert(fields, dict[str, _Tensor])
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise UsageError(f"{path}: is not a safetensors file: {error}") from error
        self._begin = _LENGTH_BYTES + length
        self._tensors = sorted(tensors.items(), key=lambda each: each[1].data_offsets)
        for name, tensor in self._tensors:
            self._check(name, tensor)

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(n, _DTYPES[each.dtype], each.shape) for n, each in self._tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            with self._path.open("rb") as file:
                for name, tensor in self._tensors:
                    begin, end = tensor.data_offsets
                    file.seek(self._begin + begin)
                    data = bytearray(end - begin)
                    if file.readinto(data) < len(data):
                        raise self._changed()
                    dtype = getattr(torch, _DTYPES[tensor.dtype])
                    flat = (
                        torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                    )
                    yield name, flat.reshape(tensor.shape)
        except OSError as error:
            raise Conflict(f"{self._path}: {error.strerror}") from error

    def require_unchanged(self) -> None:
        """Raises ``Conflict`` if the file was written or replaced since its head was read."""
        try:
            changed = _state_of(self._path) != self._state
        except OSError as error:
            raise Conflict(f"{self._path}: {error.strerror}") from error
        if changed:
            raise self._changed()

    def _check(self, name: str, tensor: _Tensor) -> None:
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{self._path}: {name}: dtype {tensor.dtype} is not supported")
        begin, end = tensor.data_offsets
        size = TensorMeta(name, _DTYPES[tensor.dtype], tensor.shape).size_bytes
        if min(tensor.shape, default=0) < 0 or begin < 0 or end - begin != size:
            raise UsageError(f"{self._path}: {name}: needs {size} bytes, but has {end - begin}")
        if self._begin + end > self._state[1]:
            raise UsageError(f"{self._path}: {name}: the file ends before this tensor does")

    def _changed(self) -> Conflict:
        return Conflict(f"{self._path} changed while it was read: call again when it is complete")


class FolderSource:
    """A weight source of all safetensors in a folder, read tensor by tensor.

    The constructor blocks: it reads the heads of all files.

    Args:
        folder: the folder, on this host. If it has an index, only the files in the index are read.

    Raises:
        UsageError: the folder has no safetensors, a file can't be read, or a dtype is unsupported.
    """

    def __init__(self, folder: str) -> None:
        self._files = [_File(each) for each in _weight_files(folder)]

    def metadata(self) -> list[TensorMeta]:
        return [meta for each in self._files for meta in each.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of all files; the last tensor only if no file has changed.

        Raises:
            Conflict: a file has changed since the source was made. All files are checked at the
                end, because a writer changes one after the other.
        """
        last = None
        for each in chain.from_iterable(self._files):
            if last is not None:
                yield last
            last = each
        for file in self._files:
            file.require_unchanged()
        if last is not None:
            yield last


def read_adapter(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the configuration of a LoRA adapter, as PEFT saves them.

    Raises:
        Missing: a file of the adapter does not exist, or not yet.
        Conflict: the tensors' file changed while it was read.
        UsageError: a file can't be read.
    """
    config, tensors = (Path(folder) / name for name in _OF_ADAPTER)
    if absent := [each.name for each in (config, tensors) if not _is_file(each)]:
        raise Missing(f"lora_path={folder!r}: the gateway's host has no {absent[0]} there")
    file = _File(tensors)
    read = dict(file), _read_json(config)
    file.require_unchanged()
    return read


def _weight_files(folder: str) -> list[Path]:
    path = Path(folder)
    try:
        indexes = sorted(path.glob("*.safetensors.index.json"))
    except OSError as error:  # the name is too long
        raise UsageError(f"{folder!r}: {error.strerror}") from error
    try:
        named = {
            path / file for each in indexes for file in _read_json(each)["weight_map"].values()
        }
    except (KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{indexes[0]}: must have a weight_map of file names") from error
    files = sorted(named) or sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder!r}: the gateway's host sees no safetensors files there")
    return files


def _is_file(path: Path) -> bool:
    """Returns whether the path is an ordinary file; opening a pipe, for example, may block."""
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def _state_of(path: Path) -> tuple[int, int, int]:
    """Returns (inode, size in bytes, time of change in ns), which differ after a write."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_json(file: Path) -> dict[str, Any]:
    if not _is_file(file):
        raise UsageError(f"{file}: the gateway's host has no such file")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}: must be a JSON object")
    return found
