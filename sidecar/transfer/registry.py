"""The table of receivers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus.backends import Backends
from bus.errors import EngineError, UsageError
from bus.messages import NackCode
from sidecar.transfer.gloo import GlooReceiver
from sidecar.transfer.shm import ShmReceiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.transfer.base import Receiver

_receivers: Final[Backends[Receiver]] = Backends(
    "wavebus.receivers", {"shm": ShmReceiver, "gloo": GlooReceiver}
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
