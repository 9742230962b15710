"""The table of receivers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from bus import cuda
from bus.backends import Backends
from bus.errors import EngineError, UsageError
from bus.messages import NackCode
from sidecar.transfer.gloo import GlooReceiver
from sidecar.transfer.shm import ShmReceiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.transfer.base import Receiver


def _nccl() -> Receiver:
    from sidecar.transfer.nccl import NcclReceiver  # noqa: PLC0415 - where there are GPUs

    return NcclReceiver()


def _ipc() -> Receiver:
    from sidecar.transfer.ipc import IpcReceiver  # noqa: PLC0415 - same

    return IpcReceiver()


_receivers: Final[Backends[Receiver]] = Backends(
    "wavebus.receivers",
    {"shm": ShmReceiver, "gloo": GlooReceiver, "nccl": _nccl, "ipc": _ipc},
    lacking={
        "nccl": lambda: cuda.why_no_nccl(torch, dist),
        "ipc": lambda: cuda.why_missing(torch),
    },
)


def register_receiver(name: str, factory: Callable[[], Receiver]) -> None:
    """Take a backend of your own; see :mod:`bus.backends` for processes that others start.

    Raises:
        UsageError: the name is one of wavebus's own, or can't be one.
    """
    _receivers.register(name, factory)


def available_backends() -> tuple[str, ...]:
    """Names that :func:`make_receiver` takes."""
    return _receivers.names()


def make_receiver(backend: str, device: torch.device | None = None) -> Receiver:
    """A closed receiver for ``backend``.

    Args:
        device: where the engine has its weights. Default: CPU memory.

    Raises:
        EngineError: code ``backend_missing``, with the names there are, or why it can't be
            loaded.
    """
    try:
        factory = _receivers.find(backend)
    except UsageError as error:
        raise EngineError(str(error), code=NackCode.BACKEND_MISSING) from error
    if factory is None:
        raise EngineError(
            f"no transfer backend {backend!r} here; there are: {', '.join(available_backends())}",
            code=NackCode.BACKEND_MISSING,
        )
    receiver = factory()
    if device is not None:
        receiver.device = device
    return receiver
