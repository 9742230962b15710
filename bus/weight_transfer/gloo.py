"""Transfers weights over TCP with gloo, to engines on any number of hosts: both ends.

Each chunk is one broadcast. The sender runs the store where all ends meet. If one end dies, the
broadcast fails for all ends at once. If one end is only silent, the broadcast fails after a
timeout per chunk, which is a deadline on progress and not on the update.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override  # torch requires it

from bus.errors import WavebusError
from bus.weight_transfer import rendezvous
from bus.weight_transfer.allocation import RankAssignment
from bus.weight_transfer.base import Receiver, Sender
from bus.weight_transfer.formats import (
    BroadcastChunk,
    GlooInit,
    decode_received,
    encode,
    transfer_failed,
)
from bus.weight_transfer.packing import ViewCache, check_broadcast, pack, packed_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.manifest import TensorMeta
    from bus.weight_transfer.allocation import World


def _join(init: GlooInit, place: RankAssignment) -> Any:
    """Joins a communicator, and returns its process group when all ends are there.

    Raises:
        OSError: no store listens there.
        RuntimeError: the store went away, or an end did not come within ``init.timeout_ms``.
    """
    store = rendezvous.connect_store(
        init.host, init.port, place.communicator, init.timeout_ms / 1000
    )
    # There is no other way to the device.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._timeout = timedelta(milliseconds=init.timeout_ms)  # noqa: SLF001
    here = rendezvous.address_towards(init.host)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]  # noqa: SLF001
    return dist.ProcessGroupGloo(store, place.rank, place.world_size, options)


def _broadcast(group: Any, memory: torch.Tensor) -> None:
    """Broadcasts contiguous bytes from rank 0; returns when this end has done its part.

    Raises:
        RuntimeError: an end is gone, or was silent for longer than the group's timeout.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([memory], options).wait()


class GlooSender(Sender):
    """Broadcasts chunks as rank 0. One chunk is packed while the one before is sent."""

    is_collective: ClassVar[bool] = True

    def __init__(self) -> None:
        self._store: Any = None
        self._group: Any = None
        self._init: GlooInit | None = None
        self._place = RankAssignment(0, 1, 0)
        self._buffers: list[torch.Tensor] = []
        self._filled_bytes: dict[int, int] = {}

    @override
    def open(self, chunk_bytes: int, world: World) -> bytes:
        self.close()
        room = max(chunk_bytes, 1)
        timeout_s = rendezvous.chunk_timeout_s(room)
        self._store = rendezvous.open_store(world.address, timeout_s)
        port: int = self._store.port
        self._buffers = [torch.empty(room, dtype=torch.uint8) for _ in range(self.prefetch_depth)]
        self._init = GlooInit(world.address, port, room, self.prefetch_depth, timeout_s * 1000)
        self._place = RankAssignment(world.number, world.size, 0)
        return encode(self._init)

    @override
    def meet(self) -> None:
        init = self._init
        assert init is not None, "open comes first"
        try:
            group = _join(init, self._place)
        except (RuntimeError, OSError) as error:
            raise WavebusError(
                f"not all {self._place.world_size - 1} ends of the engines came to "
                f"{init.host}:{init.port}: {rendezvous.reason(error)}"
            ) from error
        if self._init is init:  # not closed meanwhile
            self._group = group

    @override
    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        filled_bytes = pack(self._buffers[seq % self.prefetch_depth], tensors)[-1]
        self._filled_bytes[seq] = filled_bytes
        return encode(BroadcastChunk(filled_bytes))

    @override
    def transfer(self, seq: int) -> None:
        size_bytes = self._filled_bytes.pop(seq)
        if not size_bytes:
            return
        try:
            _broadcast(self._group, self._buffers[seq % self.prefetch_depth][:size_bytes])
        except RuntimeError as error:
            raise WavebusError(
                f"the broadcast of chunk {seq} broke: {rendezvous.reason(error)}"
            ) from error

    def close(self) -> None:
        """Frees everything. An end that still waits in the store gets an error."""
        self._store = self._group = self._init = None
        self._buffers = []
        self._filled_bytes = {}


class GlooReceiver(Receiver):
    """Receives as one rank of the trainer's communicator, with as many buffers as the trainer."""

    is_collective = True

    def __init__(self) -> None:
        self._group: Any = None
        self._buffers: deque[torch.Tensor] = deque()
        self._views = ViewCache()

    @override
    def open(self, params: bytes, place: RankAssignment) -> None:
        init = decode_received(params, GlooInit)
        self.close()
        try:
            self._group = _join(init, place)
        except (RuntimeError, OSError) as error:
            raise transfer_failed(
                f"rank {place.rank} of {place.world_size} can't meet the others at "
                f"{init.host}:{init.port}: {rendezvous.reason(error)}"
            ) from error
        self._buffers.extend(
            torch.empty(init.chunk_bytes, dtype=torch.uint8) for _ in range(init.buffers)
        )
        self.prefetch_depth = init.buffers
        self.room_bytes = init.chunk_bytes

    @override
    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        chunk = decode_received(handle, BroadcastChunk)
        offsets = packed_offsets(tensors)
        # First, so that no error later leaves the other ranks waiting for this one.
        group = self._group
        if group is None:
            raise transfer_failed("the communicator is not open")
        memory = self._buffers[0]
        check_broadcast(chunk.size_bytes, offsets[-1], memory.numel())
        if chunk.size_bytes:
            try:
                _broadcast(group, memory[: chunk.size_bytes])
            except RuntimeError as error:
                if self._group is group:
                    self.close()  # later broadcasts in it could not be assigned to chunks
                raise transfer_failed(f"the broadcast broke: {rendezvous.reason(error)}") from error
        if self._group is group:  # the transport may have been opened again meanwhile
            self._buffers.rotate(-1)
        return self._views.get(memory, offsets[:-1], tensors)

    @override
    def close(self) -> None:
        self._group = None
        self._buffers.clear()
        self._views.clear()
