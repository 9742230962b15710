"""The table of senders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from bus import cuda
from bus.backends import Backends
from bus.errors import UsageError
from trainer_agent.transfer.gloo import GlooSender
from trainer_agent.transfer.shm import ShmSender

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_agent.transfer.base import Sender

MAX_BUFFERS: Final = 16


def _nccl() -> Sender:
    from trainer_agent.transfer.nccl import NcclSender  # noqa: PLC0415 - where there are GPUs

    return NcclSender()


def _ipc() -> Sender:
    from trainer_agent.transfer.ipc import IpcSender  # noqa: PLC0415 - same

    return IpcSender()


_senders: Final[Backends[Sender]] = Backends(
    "wavebus.senders",
    {"shm": ShmSender, "gloo": GlooSender, "nccl": _nccl, "ipc": _ipc},
    lacking={
        "nccl": lambda: cuda.why_no_nccl(torch, dist),
        "ipc": lambda: cuda.why_missing(torch),
    },
)


def register_sender(name: str, factory: Callable[[], Sender]) -> None:
    """Take a backend of your own; see :mod:`bus.backends` for processes that others start.

    Raises:
        UsageError: the name is one of wavebus's own, or can't be one.
    """
    _senders.register(name, factory)


def available_backends() -> tuple[str, ...]:
    """Names that :func:`make_sender` takes."""
    return _senders.names()


def make_sender(
    backend: str, *, buffers: int | None = None, packed: bool = True, device: str = ""
) -> Sender:
    """A closed sender for ``backend``.

    Args:
        buffers: room for how many chunks at a time. Default: what the sender itself has.
        packed, device: see :class:`Sender`.

    Raises:
        UsageError: names the backends there are, or says why this one can't be loaded, or can't
            do without packing.
    """
    if buffers is not None and not 1 <= buffers <= MAX_BUFFERS:
        raise UsageError(f"buffers={buffers}: from 1 to {MAX_BUFFERS}")
    factory = _senders.find(backend)
    if factory is None:
        raise UsageError(f"backend={backend!r}: choose one of {', '.join(available_backends())}")
    sender = factory()
    if buffers is not None:
        sender.depth = buffers
    if not packed and not sender.sends_unpacked:
        raise UsageError(f"packed=False: {backend} always packs; shm, nccl and ipc need not")
    sender.packed = packed
    sender.device = device
    return sender
