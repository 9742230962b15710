"""The wire form of one LoRA adapter's update: one chunk, a folder on tmpfs.

The backend ``lora:policy-lora``, for example, carries only the adapter ``policy-lora``. The trainer
writes it as PEFT does, into a folder of :data:`bus.weight_transfer.formats.SHM_FOLDER` that
only its user may enter; engines of the same host read it by its path. ``TransferInit.params`` and
``WeightChunkMeta.handle`` are both an :class:`AdapterFolder`.

An update of an adapter can be undone until it is committed, because engines keep the previous one.
So an engine that drops out of the update never serves a partial adapter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from bus.errors import UsageError
from bus.locked_paths import SHM_PREFIX

PREFIX: Final = "lora:"
FOLDER_PREFIX: Final = f"{SHM_PREFIX}lora-"
CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The location of an adapter: the folder's name, and its config's SHA-256 in hex."""

    folder: Annotated[str, Meta(max_length=128, pattern=r"^wavebus-lora-[A-Za-z0-9_-]+\Z")]
    config_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


def check_adapter_name(name: str) -> str:
    """Returns ``name`` if it is a valid name of an adapter.

    Raises:
        UsageError: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"adapter={name!r}: 1 to 128 letters, digits and . _ -, starting with a letter or digit"
        )
    return name


def adapter_backend(name: str) -> str:
    """Returns the transfer backend that carries the adapter ``name``.

    Raises:
        UsageError: the name is no valid name of an adapter.
    """
    return PREFIX + check_adapter_name(name)


def adapter_of(backend: str) -> str:
    """Returns the adapter that a transfer backend carries; empty for a model's weights."""
    return backend.removeprefix(PREFIX) if backend.startswith(PREFIX) else ""
