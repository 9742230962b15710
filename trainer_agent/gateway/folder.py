"""Reads weights and adapters from folders that a client of the gateway names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from bus.errors import UsageError
from bus.manifest import TensorMeta
from trainer_agent.gateway.updates import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

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


class FolderSource:
    """A weight source of all safetensors in a folder, which are mapped, not copied.

    Make it in a thread: it reads the heads of all files, and the folder may be slow.

    Args:
        folder: the folder, on this host. If it has an index, only the files that this names count.

    Raises:
        UsageError: there are no safetensors, a file can't be read, or it has a dtype that is not
            sent.
    """

    def __init__(self, folder: str) -> None:
        self._files = _weight_files(folder)
        self._metas = self._read_metadata()

    def metadata(self) -> list[TensorMeta]:
        """Returns names, dtypes and shapes, file by file."""
        return self._metas

    def _read_metadata(self) -> list[TensorMeta]:
        metas = []
        for file in self._files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    part = tensors.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise UsageError(f"{file}: {name}: dtype {part.get_dtype()} is not sent")
                    metas.append(TensorMeta(name, dtype, tuple(part.get_shape())))
        return metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    yield name, tensors.get_tensor(name)


def read_adapter(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the configuration of a LoRA adapter, as PEFT saves them.

    Args:
        folder: the adapter's folder.

    Raises:
        Missing: there is none, or not yet.
        UsageError: it can't be read.
    """
    config, tensors = (Path(folder) / name for name in _OF_ADAPTER)
    if absent := [each.name for each in (config, tensors) if not _is_file(each)]:
        raise Missing(f"lora_path={folder!r}: no {absent[0]} that the gateway's host sees")
    try:
        return load_file(tensors), _read_json(config)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder!r}: no adapter_model.safetensors: {error}") from error


def _weight_files(folder: str) -> list[Path]:
    path = Path(folder)
    try:
        indexes = sorted(path.glob("*.safetensors.index.json"))
    except OSError as error:  # the name is too long
        raise UsageError(f"{folder!r}: {error.strerror}") from error
    try:
        named = {file for each in indexes for file in _read_json(each)["weight_map"].values()}
    except (KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{indexes[0]}: has no weight_map") from error
    files = sorted(path / name for name in named) or sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder!r}: no safetensors here; the gateway's host must see them")
    return files


def _is_file(path: Path) -> bool:
    """Returns whether it is an ordinary file. To open another kind, such as a pipe, may wait."""
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def _opened(file: Path) -> Any:
    if not _is_file(file):
        raise UsageError(f"{file}: no such file on the gateway's host")
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not _is_file(file):
        raise UsageError(f"{file}: no such file on the gateway's host")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}: a JSON object is needed")
    return found
