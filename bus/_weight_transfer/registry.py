"""Finds the sender and the receiver of a backend by its name.

A backend of your own is one class and one registration on each side. A process that you start
registers in code (:func:`register_sender`, :func:`register_receiver`). Processes that wavebus or
vLLM start find the entry points of installed packages::

    [project.entry-points."wavebus.senders"]
    pigeons = "my_package.pigeons:PigeonSender"
    [project.entry-points."wavebus.receivers"]
    pigeons = "my_package.pigeons:PigeonReceiver"
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from bus._ids import check_name
from bus._weight_transfer import cuda
from bus._weight_transfer.gloo import GlooReceiver, GlooSender
from bus._weight_transfer.ipc import IpcReceiver, IpcSender
from bus._weight_transfer.nccl import NcclReceiver, NcclSender
from bus._weight_transfer.shm import ShmReceiver, ShmSender
from bus.errors import EngineError, UsageError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from bus._weight_transfer.base import Receiver, Sender

T = TypeVar("T")

MAX_BUFFERS: Final = 16


class BackendRegistry(Generic[T]):
    """Finds the factory of one end of a backend by its name.

    Args:
        group: the group of entry points that is searched for names that are not registered.
        built_in: the backends that come with wavebus. No other may take their names.
        unavailable_reasons: for built-in backends that not every machine supports, a function that
            says why this machine does not; an empty text where it does. Called each time.
    """

    def __init__(
        self,
        group: str,
        built_in: Mapping[str, Callable[[], T]],
        unavailable_reasons: Mapping[str, Callable[[], str]] | None = None,
    ) -> None:
        self._group = group
        self._built_in = dict(built_in)
        self._unavailable_reasons = dict(unavailable_reasons or {})
        self._registered: dict[str, Callable[[], T]] = {}

    def register(self, name: str, factory: Callable[[], T]) -> None:
        """Registers ``factory`` as the backend ``name``, in place of an earlier one.

        Args:
            factory: makes a sender or a receiver, as this registry has; a class will do.

        Raises:
            UsageError: the name is one of wavebus's own, or not a valid name.
        """
        check_name(name, "backend")
        if name in self._built_in:
            raise UsageError(f"backend={name!r} is wavebus's own; choose another name")
        self._registered[name] = factory

    def names(self) -> tuple[str, ...]:
        """Returns all names: built in and available here, registered, installed."""
        built_in = (name for name in self._built_in if not self._unavailable_reason(name))
        installed = (point.name for point in entry_points(group=self._group))
        return tuple(dict.fromkeys((*built_in, *self._registered, *sorted(installed))))

    def find(self, name: str) -> Callable[[], T] | None:
        """Returns the factory of a backend, or None if there is none.

        Raises:
            UsageError: this machine does not support it, or the package that offers it can't be
                imported.
        """
        reason = self._unavailable_reason(name)
        if reason:
            raise UsageError(f"backend={name!r}: {reason}")
        found = self._built_in.get(name) or self._registered.get(name)
        if found is not None:
            return found
        for point in entry_points(group=self._group, name=name):
            try:
                loaded: Callable[[], T] = point.load()
            except Exception as error:
                raise UsageError(
                    f"backend={name!r}: {point.value}, an entry point of {self._group}, "
                    f"can't be loaded: {type(error).__name__}: {error}"
                ) from error
            return loaded
        return None

    def _unavailable_reason(self, name: str) -> str:
        return self._unavailable_reasons.get(name, str)()


_UNAVAILABLE_REASONS: Final = {
    "nccl": cuda.nccl_unavailable_reason,
    "ipc": cuda.unavailable_reason,
}
_senders: Final[BackendRegistry[Sender]] = BackendRegistry(
    "wavebus.senders",
    {"shm": ShmSender, "gloo": GlooSender, "nccl": NcclSender, "ipc": IpcSender},
    _UNAVAILABLE_REASONS,
)
_receivers: Final[BackendRegistry[Receiver]] = BackendRegistry(
    "wavebus.receivers",
    {"shm": ShmReceiver, "gloo": GlooReceiver, "nccl": NcclReceiver, "ipc": IpcReceiver},
    _UNAVAILABLE_REASONS,
)


def register_sender(name: str, factory: Callable[[], Sender]) -> None:
    """Registers the sender of your own backend in this process.

    Processes that wavebus or vLLM start need an entry point instead (see the module).

    Args:
        name: the backend's name.
        factory: makes a sender; a class will do.

    Raises:
        UsageError: the name is one of wavebus's own, or not a valid name.
    """
    _senders.register(name, factory)


def sender_backends() -> tuple[str, ...]:
    """Returns the names that :func:`make_sender` accepts."""
    return _senders.names()


def make_sender(
    backend: str, *, buffers: int | None = None, packed: bool = True, device: str = ""
) -> Sender:
    """Makes a sender that is not open yet.

    Args:
        buffers: how many chunks may be in flight, from 1 to 16. Default: the sender's own.
        packed: True: chunks are packed into buffers. False: tensors are sent from where they are.
        device: the GPU to send from, such as ``cuda:0``. Default: the current one of the thread
            that opens the sender.

    Raises:
        UsageError: there is no such backend here (the text names those there are), it can't be
            loaded, it can't send unpacked, or ``buffers`` is out of range.
    """
    if buffers is not None and not 1 <= buffers <= MAX_BUFFERS:
        raise UsageError(f"buffers={buffers}: from 1 to {MAX_BUFFERS}")
    factory = _senders.find(backend)
    if factory is None:
        raise UsageError(f"backend={backend!r}: choose one of {', '.join(sender_backends())}")
    sender = factory()
    if buffers is not None:
        sender.prefetch_depth = buffers
    if not packed and not sender.can_send_unpacked:
        raise UsageError(f"packed=False: {backend} always packs; shm, nccl and ipc need not")
    sender.packed = packed
    sender.device = device
    return sender


def register_receiver(name: str, factory: Callable[[], Receiver]) -> None:
    """Registers the receiver of your own backend in this process.

    Processes that wavebus or vLLM start need an entry point instead (see the module).

    Args:
        name: the backend's name.
        factory: makes a receiver; a class will do.

    Raises:
        UsageError: the name is one of wavebus's own, or not a valid name.
    """
    _receivers.register(name, factory)


def receiver_backends() -> tuple[str, ...]:
    """Returns the names that :func:`make_receiver` accepts."""
    return _receivers.names()


def make_receiver(backend: str, device: torch.device | None = None) -> Receiver:
    """Makes a receiver that is not open yet.

    Args:
        device: where the engine has its weights. Default: CPU memory.

    Raises:
        EngineError: code ``backend_missing``. The text names the backends there are, or says why
            this one can't be loaded.
    """
    try:
        factory = _receivers.find(backend)
    except UsageError as error:
        raise EngineError(str(error), code=NackCode.BACKEND_MISSING) from error
    if factory is None:
        raise EngineError(
            f"no transfer backend {backend!r} here; there are: {', '.join(receiver_backends())}",
            code=NackCode.BACKEND_MISSING,
        )
    receiver = factory()
    if device is not None:
        receiver.device = device
    return receiver
