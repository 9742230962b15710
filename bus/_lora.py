"""Defines how an update brings or removes a LoRA adapter.

The backend ``lora:policy-lora``, for example, brings only the adapter ``policy-lora``. Its tensors
travel as a model's do, in chunks, over the backend of the trainer's agent. So they reach engines on
every host that this backend reaches. ``TransferInit.params`` is an :class:`AdapterInit`.

The backend ``lora-removal:policy-lora`` removes the adapter ``policy-lora``. Its manifest is empty
and ``TransferInit.params`` too, because nothing is sent.

An update of an adapter can be undone until it is committed, because engines keep the previous one.
So an engine that drops out of the update never serves a partial adapter.

An engine that was away may have missed updates of adapters. So ARM names the version that the group
serves (``after``), and an engine that serves another one drops all its adapters: like an engine
that has restarted, it has none until the next update of each. So a removed adapter never comes
back, and no process has to remember which adapters were removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from bus.errors import UsageError

PREFIX: Final = "lora:"
REMOVAL: Final = "lora-removal:"
MAX_CONFIG_BYTES: Final = 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class AdapterInit:
    """The ``TransferInit.params`` of an adapter's update, which engines need before its tensors.

    Attributes:
        backend: the transfer backend that carries the tensors.
        params: the parameters of that backend's sender.
        config: PEFT's ``adapter_config``, as JSON.
    """

    backend: Annotated[str, Meta(min_length=1, max_length=64)]
    params: bytes
    config: Annotated[bytes, Meta(max_length=MAX_CONFIG_BYTES)]


def check_adapter_name(name: str) -> str:
    """Returns ``name`` if it is a valid name of an adapter.

    Raises:
        UsageError: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"adapter={name!r} is not a valid name: use 1 to 128 letters, digits and . _ -, "
            "starting with a letter or digit"
        )
    return name


def adapter_backend(name: str) -> str:
    """Returns the transfer backend that brings the adapter ``name``.

    Raises:
        UsageError: the name is no valid name of an adapter.
    """
    return PREFIX + check_adapter_name(name)


def removal_backend(name: str) -> str:
    """Returns the transfer backend whose updates remove the adapter ``name``.

    Raises:
        UsageError: the name is no valid name of an adapter.
    """
    return REMOVAL + check_adapter_name(name)


def removes_adapter(backend: str) -> bool:
    """Returns whether updates over a transfer backend remove an adapter, and bring no tensors."""
    return backend.startswith(REMOVAL)


def adapter_of(backend: str) -> str:
    """Returns the adapter that a transfer backend brings or removes; empty: a model's weights."""
    for prefix in (PREFIX, REMOVAL):
        if backend.startswith(prefix):
            return backend.removeprefix(prefix)
    return ""
