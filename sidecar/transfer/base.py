"""The receiver's protocol, and the table of backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from bus.backends import Backends
from bus.errors import EngineError, UsageError
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


def check_delivered(
    backend: str, announced: tuple[TensorMeta, ...], received: list[tuple[str, torch.Tensor]]
) -> None:
    """A receiver, which may be anybody's, has brought what the manifest says.

    Raises:
        EngineError: code ``transfer_failed``, with the first tensor that is another.
    """
    if len(received) > len(announced):
        raise EngineError(
            f"transport {backend!r} delivered {len(received)} tensors for {len(announced)}",
            code=NackCode.TRANSFER_FAILED,
        )
    for place, meta in enumerate(announced):
        got = "nothing"
        if place < len(received):
            name, tensor = received[place]
            dtype = str(tensor.dtype).removeprefix("torch.")
            if (name, dtype, tensor.shape) == (meta.name, meta.dtype, meta.shape):
                continue
            got = f"{name}, {dtype} {tuple(tensor.shape)}"
        raise EngineError(
            f"transport {backend!r} delivered other tensors than announced: {got} for {meta}",
            code=NackCode.TRANSFER_FAILED,
            tensor=meta.name,
        )


_receivers: Final[Backends[Receiver]] = Backends("wavebus.receivers", {"shm": ShmReceiver})


def register_receiver(name: str, factory: Callable[[], Receiver]) -> None:
    """Take a backend of your own; see :mod:`bus.backends` for processes that others start.

    Raises:
        UsageError: the name is one of wavebus's own, or can't be one.
    """
    _receivers.register(name, factory)


def available_backends() -> tuple[str, ...]:
    """Names that :func:`make_receiver` takes."""
    return _receivers.names()


def make_receiver(backend: str) -> Receiver:
    """A closed receiver for ``backend``.

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
    return factory()
