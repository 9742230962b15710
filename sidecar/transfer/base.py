"""The receiver's protocol, and the table of backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.transfer.shm import ShmReceiver

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from bus.manifest import TensorMeta


class Receiver(Protocol):
    """Fetches chunks from a trainer. One object lives as long as one transport."""

    def open(self, params: bytes) -> None:
        """Reach the other end; a second call replaces the transport.

        Raises:
            EngineError: code ``transfer_failed``.
        """

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        """Fetch one chunk; the tensors are valid until :meth:`release`.

        Raises:
            EngineError: code ``transfer_failed``; nothing is held then.
        """

    def release(self) -> None:
        """The last chunk's tensors are no longer used."""

    def close(self) -> None:
        """Let the transport go."""


_BACKENDS: Final[dict[str, Callable[[], Receiver]]] = {"shm": ShmReceiver}


def available_backends() -> tuple[str, ...]:
    """Names that :func:`make_receiver` takes."""
    return tuple(_BACKENDS)


def make_receiver(backend: str) -> Receiver:
    """A closed receiver for ``backend``.

    Raises:
        EngineError: code ``backend_missing``, with the names there are.
    """
    factory = _BACKENDS.get(backend)
    if factory is None:
        raise EngineError(
            f"no transfer backend {backend!r} here; there are: {', '.join(_BACKENDS)}",
            code=NackCode.BACKEND_MISSING,
        )
    return factory()
