"""What ``gloo`` and ``nccl`` have in common: both ends of a backend with a communicator."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from typing_extensions import override  # torch requires it

from bus._weight_transfer import rendezvous
from bus._weight_transfer.allocation import RankAssignment
from bus._weight_transfer.base import Receiver, Sender
from bus._weight_transfer.formats import GlooInit, encode, transfer_failed
from bus._weight_transfer.packing import ViewCache, check_broadcast, packed_offsets
from bus.errors import WavebusError

if TYPE_CHECKING:
    import torch

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import World
    from bus._weight_transfer.formats import BroadcastChunk
    from bus._weight_transfer.packing import ReceivedChunk
    from bus._weight_transfer.rendezvous import MeetingPoint


class ConnectedEnd(Protocol):
    """One connected end of a communicator."""

    def close(self) -> None:
        """Leaves the communicator; a broadcast of another thread ends."""


C = TypeVar("C", bound=ConnectedEnd)
Init = TypeVar("Init", bound=GlooInit)


class CollectiveSender(Sender, Generic[C, Init]):
    """Meets the engines' ends as rank 0. A subclass broadcasts."""

    is_collective: ClassVar[bool] = True

    def __init__(self) -> None:
        self._point: MeetingPoint | None = None
        self._communicator: C | None = None
        self._init: Init | None = None
        self._place = RankAssignment(0, 1, 0)
        self._buffers: list[torch.Tensor] = []

    def _listen(self, point: MeetingPoint, init: Init, world: World) -> bytes:
        """Stores where the ends meet; returns ``init`` encoded, as :meth:`open` does."""
        self._point, self._init = point, init
        self._place = RankAssignment(world.number, world.size, 0)
        return encode(init)

    @abstractmethod
    def _join(self, init: Init) -> C:
        """Returns this end of the communicator when all ends are there.

        Raises:
            RuntimeError, OSError: an end is missing.
        """

    @override
    def meet(self) -> None:
        init = self._init
        assert init is not None, "open comes first"
        try:
            met = self._join(init)
        except (RuntimeError, OSError) as error:
            raise WavebusError(
                f"not all {self._place.world_size - 1} ends of the engines came to "
                f"{init.host}:{init.port}: {rendezvous.reason(error)}"
            ) from error
        if self._init is not init:  # closed meanwhile, and perhaps opened again
            met.close()
            return
        self._communicator = met

    def _require_communicator(self) -> C:
        if self._communicator is None:
            raise RuntimeError("it is closed")
        return self._communicator

    def close(self) -> None:
        """Frees everything. Ends that still wait get an error."""
        point, self._point = self._point, None
        communicator, self._communicator = self._communicator, None
        self._init = None
        if point is not None:
            point.close()
        if communicator is not None:
            communicator.close()
        self._buffers = []


def broadcast_failed(seq: int, error: RuntimeError) -> WavebusError:
    """Returns the error of a sender whose broadcast of a chunk broke."""
    return WavebusError(f"the broadcast of chunk {seq} broke: {rendezvous.reason(error)}")


class CollectiveReceiver(Receiver, Generic[C, Init]):
    """Receives as one rank of the trainer's communicator, with as many buffers as the trainer."""

    is_collective = True

    def __init__(self) -> None:
        self._communicator: C | None = None
        self._buffers: deque[torch.Tensor] = deque()
        self._views = ViewCache()

    @abstractmethod
    def _join(self, init: Init, place: RankAssignment) -> C:
        """Returns this end of the communicator when all ends are there; raises as a sender's."""

    def _meet(self, init: Init, place: RankAssignment) -> None:
        """Connects this end.

        Raises:
            EngineError: code ``transfer_failed``: an end is missing.
        """
        try:
            self._communicator = self._join(init, place)
        except (RuntimeError, OSError) as error:
            self.close()
            raise transfer_failed(
                f"rank {place.rank} of {place.world_size} can't meet the others at "
                f"{init.host}:{init.port}: {rendezvous.reason(error)}"
            ) from error

    def _require_communicator(self) -> C:
        if self._communicator is None:
            raise transfer_failed("the communicator is not open")
        return self._communicator

    def _next_buffer(
        self, tensors: tuple[TensorMeta, ...], chunk: BroadcastChunk
    ) -> tuple[ReceivedChunk, torch.Tensor]:
        """Returns a packed chunk's tensors, and the memory to broadcast into."""
        offsets = packed_offsets(tensors)
        memory = self._buffers[0]
        check_broadcast(chunk.size_bytes, offsets[-1], memory.numel())
        self._buffers.rotate(-1)
        return self._views.get(memory, offsets[:-1], tensors), memory[: chunk.size_bytes]

    @override
    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()
        self._buffers.clear()
        self._views.clear()
