"""Transfers weights over TCP with gloo, to engines on any number of hosts: both ends.

Each chunk is one broadcast, which no end enters before all have announced it
(:mod:`bus._weight_transfer.entry_barrier`). If one end dies, the broadcast fails for all ends at
once. If one end is only silent, the broadcast fails after a timeout per chunk, which is a deadline
on progress and not on the update.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from typing_extensions import override  # torch requires it

from bus._weight_transfer import rendezvous
from bus._weight_transfer.collective import CollectiveReceiver, CollectiveSender, broadcast_failed
from bus._weight_transfer.formats import (
    BroadcastChunk,
    GlooInit,
    decode_received,
    encode,
    transfer_failed,
)
from bus._weight_transfer.packing import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import RankAssignment, World
    from bus._weight_transfer.entry_barrier import EntryBarrier
    from bus._weight_transfer.rendezvous import MeetingPoint


# A broadcast of gloo stops one thread and no engine, so an end may be silent for long.
_SILENCE_S: Final = 10.0
_LOOK_S: Final = 0.5
# A broadcast that broke is known sooner than the loss that broke it, by far less than this.
_LOSS_S: Final = 1.0


class _Communicator:
    """One connected end.

    Args:
        group: the ``ProcessGroupGloo``.
        barrier: the agreement with the other ends.
    """

    def __init__(self, group: Any, barrier: EntryBarrier) -> None:
        self._group = group
        self._barrier = barrier
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def broadcast(self, memory: torch.Tensor) -> None:
        """Broadcasts contiguous bytes from rank 0; returns when this end has done its part.

        Raises:
            RuntimeError: an end is gone or silent, or this one was closed.
        """
        timeout_s = rendezvous.chunk_timeout_s(memory.numel())
        try:
            entry = self._barrier.announce(timeout_s, timeout_s)
            with self._barrier.entering(entry):
                work = self._group.broadcast([memory], self._options)
            self._wait(work)
        except RuntimeError:
            # The loss of an end breaks the broadcast for all, and the barrier knows whose it was.
            if self._barrier.wait_lost(_LOSS_S):
                self._barrier.require()
            self._barrier.close()  # later broadcasts could not be assigned to chunks
            raise
        self._barrier.finish(entry)

    def close(self) -> None:
        """Leaves the communicator; a broadcast of another thread ends."""
        self._barrier.close()

    def _wait(self, work: Any) -> None:
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what broke it, unless it has ended only just now
                    return
            else:
                return
            if self._barrier.is_lost:
                # The group's last reference would wait for the broadcast.
                _abandon(work, self._group)
                self._barrier.require()


def _abandon(work: Any, group: Any) -> None:
    """Keeps a group until its broadcast has ended, in a thread."""

    def wait(_: Any) -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()

    threading.Thread(target=wait, args=(group,), name="wavebus-gloo", daemon=True).start()


def _join(init: GlooInit, place: RankAssignment, point: MeetingPoint | None) -> _Communicator:
    """Joins a communicator, and returns this end when all ends are there.

    Raises:
        OSError: nobody listens there.
        RuntimeError: the trainer's end went away, or an end did not come within
            ``init.timeout_ms``.
    """
    barrier, store = rendezvous.meet(init, place, point, "", _SILENCE_S)
    try:
        # There is no other way to the device.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._timeout = timedelta(milliseconds=init.timeout_ms)  # noqa: SLF001
        here = rendezvous.address_towards(init.host)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]  # noqa: SLF001
        if point is not None:  # the others wait in the store for an end that is lost
            barrier.call_when_lost(lambda _: point.close())
        group = dist.ProcessGroupGloo(store, place.rank, place.world_size, options)
    except BaseException as error:
        try:
            if isinstance(error, RuntimeError) and barrier.wait_lost(_LOSS_S):
                barrier.require()  # it knows who is lost
        finally:
            barrier.close()
        raise
    return _Communicator(group, barrier)


class GlooSender(CollectiveSender[_Communicator, GlooInit]):
    """Broadcasts chunks as rank 0. One chunk is packed while the one before is sent."""

    def __init__(self) -> None:
        super().__init__()
        self._filled_bytes: dict[int, int] = {}

    @override
    def open(self, chunk_bytes: int, world: World) -> bytes:
        self.close()
        room = max(chunk_bytes, 1)
        self._buffers = [torch.empty(room, dtype=torch.uint8) for _ in range(self.prefetch_depth)]
        point = rendezvous.MeetingPoint.open(world, room, self.prefetch_depth)
        return self._listen(point, GlooInit(**point.params), world)

    @override
    def _join(self, init: GlooInit) -> _Communicator:
        return _join(init, self._place, self._point)

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
            communicator = self._require_communicator()
            communicator.broadcast(self._buffers[seq % self.prefetch_depth][:size_bytes])
        except RuntimeError as error:
            raise broadcast_failed(seq, error) from error

    @override
    def close(self) -> None:
        super().close()
        self._filled_bytes = {}


class GlooReceiver(CollectiveReceiver[_Communicator, GlooInit]):
    """Receives as one rank of the trainer's communicator."""

    @override
    def open(self, params: bytes, place: RankAssignment) -> None:
        init = decode_received(params, GlooInit)
        self.close()
        self._meet(init, place)
        self._buffers.extend(
            torch.empty(init.chunk_bytes, dtype=torch.uint8) for _ in range(init.buffers)
        )
        self.prefetch_depth = init.buffers
        self.room_bytes = init.chunk_bytes

    @override
    def _join(self, init: GlooInit, place: RankAssignment) -> _Communicator:
        return _join(init, place, None)

    @override
    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        chunk = decode_received(handle, BroadcastChunk)
        # First, so that no error later leaves the other ranks waiting for this one.
        communicator = self._require_communicator()
        received, memory = self._next_buffer(tensors, chunk)
        if chunk.size_bytes:
            try:
                communicator.broadcast(memory)
            except RuntimeError as error:
                if self._communicator is communicator:
                    self.close()
                raise transfer_failed(f"the broadcast broke: {rendezvous.reason(error)}") from error
        return received
