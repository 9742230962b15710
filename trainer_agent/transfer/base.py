"""The sender's protocol, and the table of backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from bus.backends import Backends
from bus.errors import UsageError
from trainer_agent.transfer.shm import ShmSender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Sender(Protocol):
    """Makes tensors reachable for the engines. One object lives as long as one transport.

    The agent calls :meth:`open`, has every engine open its end with the returned
    params, then :meth:`opened`; then :meth:`put` for each chunk, and never more
    than :attr:`depth` chunks that no :meth:`taken` has answered.
    """

    depth: int

    def open(self, chunk_bytes: int) -> bytes:
        """Make room for chunks of up to ``chunk_bytes``; return the engines' params."""

    def opened(self) -> None:
        """Every engine has opened its end."""

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        """Offer one chunk; return the handle for its WEIGHT_CHUNK_META."""

    def taken(self, seq: int) -> None:
        """Every engine has taken the chunk; its room may be used again."""

    def packed_bytes(self, sizes_bytes: Sequence[int]) -> int:
        """Room that tensors of these sizes take in one chunk."""

    def close(self) -> None:
        """Let everything go."""


_senders: Final[Backends[Sender]] = Backends("wavebus.senders", {"shm": ShmSender})


def register_sender(name: str, factory: Callable[[], Sender]) -> None:
    """Take a backend of your own; see :mod:`bus.backends` for processes that others start.

    Raises:
        UsageError: the name is one of wavebus's own, or can't be one.
    """
    _senders.register(name, factory)


def available_backends() -> tuple[str, ...]:
    """Names that :func:`make_sender` takes."""
    return _senders.names()


def make_sender(backend: str) -> Sender:
    """A closed sender for ``backend``.

    Raises:
        UsageError: names the backends there are, or says why this one can't be loaded.
    """
    factory = _senders.find(backend)
    if factory is None:
        raise UsageError(f"backend={backend!r}: choose one of {', '.join(available_backends())}")
    return factory()
