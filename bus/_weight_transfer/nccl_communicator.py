"""One end of an NCCL communicator, the same on both sides.

It uses torch's ``ProcessGroupNCCL``, beside any other groups of the process. torch handles failures
by a watchdog that ends the process, or by a wait without end. Here an end waits with a deadline,
can be closed meanwhile, and raises.

NCCL does not notice a dead peer where GPUs read each other's memory (NVLink): its kernel keeps
waiting, and CUDA calls of any thread may wait for the kernel. So all ends agree on each broadcast
before they enter it, and the loss of an end ends it (:mod:`bus._weight_transfer.entry_barrier`).
Three threads do this:

- the barrier's watches the other ends, and aborts the communicator. It makes no other CUDA call;
- one enters broadcasts, in order, when all ends have announced them;
- one waits until each has ended, so that the barrier knows without asking the GPU.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist

from bus._weight_transfer import rendezvous
from bus._weight_transfer.cuda import device_uuid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from bus._weight_transfer.allocation import RankAssignment
    from bus._weight_transfer.entry_barrier import CollectiveEntry, EntryBarrier
    from bus._weight_transfer.formats import NcclInit
    from bus._weight_transfer.rendezvous import MeetingPoint

# torch reads this variable when a group is made. If set, the group has no watchdog thread. That
# thread would end the process if an operation failed or took longer than the group's timeout.
_NO_WATCHDOG: Final = "TORCH_NCCL_BLOCKING_WAIT"
# If set, NCCL takes it for the host's name.
_HOST: Final = "NCCL_HOSTID"
_group_lock = threading.Lock()

# How long an end that others wait for inside a broadcast may be silent. Meanwhile their engines may
# generate no token.
SILENCE_S: Final = 0.5
# A broadcast that has begun may take ENTERED_S, and as long as its bytes take over a slow network.
ENTERED_S: Final = 2.0
_SLOW_BYTES_PER_S: Final = 100_000_000
# Aborting takes milliseconds, but could hang.
_ABORT_S: Final = 10.0
# How often a broadcast that nobody waits for is looked at.
_LOOK_S: Final = 0.02
# An error of NCCL is known sooner than the loss of the end that caused it, by far less than this.
_LOSS_S: Final = 0.1
# How long a wait goes on after the communicator was lost, for a thread that enters a broadcast.
_STUCK_S: Final = 1.0


class Device(Protocol):
    """What a communicator needs of its GPU."""

    def after_queued(self) -> AbstractContextManager[None]:
        """Returns a context that another thread enters: its work comes after what is queued now."""

    def end_of(self, work: Any) -> Any:
        """Returns an event, with ``synchronize()``, at the end of queued work."""


class NcclCommunicator:
    """One connected end of a communicator. One thread uses it; any thread may wait or close it.

    Args:
        group: the ``ProcessGroupNCCL``.
        barrier: the agreement with the other ends.
        device: this end's GPU.
    """

    def __init__(self, group: Any, barrier: EntryBarrier, device: Device) -> None:
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._group = group
        self._barrier = barrier
        self._device = device
        self._aborting = threading.Lock()
        self._aborted = False
        self._announced: queue.SimpleQueue[Broadcast | None] = queue.SimpleQueue()
        self._entered: queue.SimpleQueue[Broadcast | None] = queue.SimpleQueue()
        barrier.call_when_lost(lambda _: self._leave())
        for run in (self._enter_all, self._end_all):
            threading.Thread(target=run, name="wavebus-nccl", daemon=True).start()

    def launch(self, memories: Sequence[Any], timeout_s: float | None = None) -> Broadcast:
        """Announces a broadcast from rank 0 to all; it begins when all ends have announced it.

        It begins after this thread's earlier work in the current stream.

        Args:
            memories: contiguous uint8 tensors on this end's GPU, as many and as long as at every
                other end. They must stay until the broadcast has ended.
            timeout_s: how long the broadcast may take after it has begun and the one before has
                ended, in seconds. Then this end is closed, whether anybody waits or not. None:
                :data:`ENTERED_S`, and more for many bytes.

        Raises:
            RuntimeError: this end is closed.
        """
        size_bytes = sum(memory.numel() for memory in memories)
        if timeout_s is None:
            timeout_s = ENTERED_S + size_bytes / _SLOW_BYTES_PER_S
        begins = self._device.after_queued()
        entry = self._barrier.announce(timeout_s, rendezvous.chunk_timeout_s(size_bytes))
        made = Broadcast(self._barrier, entry, memories, begins)
        self._announced.put(made)
        if self._barrier.is_lost:  # meanwhile; the thread that enters may have ended
            made.is_entered.set()
        return made

    def broadcast(self, memories: Sequence[Any], timeout_s: float | None = None) -> None:
        """Broadcasts from rank 0 to all; returns when this end has done its part.

        Args:
            memories: as in :meth:`launch`.
            timeout_s: as in :meth:`launch`.

        Raises:
            RuntimeError: as :meth:`launch` and :meth:`Broadcast.wait`.
        """
        self.launch(memories, timeout_s).wait()

    def close(self) -> None:
        """Leaves the communicator at once, even inside a broadcast, and frees its GPU memory."""
        self._barrier.close()
        self._leave()

    def _leave(self) -> None:
        with self._aborting:
            if self._aborted:
                return
            self._aborted = True
            self._announced.put(None)
            # Not shutdown(): on one host it waits for the other ends' shutdown.
            with contextlib.suppress(RuntimeError, TimeoutError):
                _call_within(_ABORT_S, self._group.abort)

    def _broadcast(self, memories: Sequence[Any]) -> Any:
        if len(memories) == 1:
            return self._group.broadcast([memories[0]], self._options)
        self._group._start_coalescing()  # noqa: SLF001 - torch has no public one
        try:
            for memory in memories:
                self._group.broadcast([memory], self._options)
        finally:
            work = self._group._end_coalescing()  # noqa: SLF001 - as above
        return work

    def _enter_all(self) -> None:
        """Enters each broadcast when all ends have announced it."""
        while (coming := self._announced.get()) is not None:
            try:
                with self._barrier.entering(coming.entry), coming.begins:
                    coming.work = self._broadcast(coming.memories)
                    coming.end = self._device.end_of(coming.work)
            except Exception as error:  # noqa: BLE001 - those who wait raise it
                self._barrier.lose(rendezvous.reason(error))
                self._leave()
            coming.is_entered.set()
            self._entered.put(coming)
        self._entered.put(None)

    def _end_all(self) -> None:
        """Notices the end of each broadcast, and NCCL's errors, though nobody may wait."""
        while (under_way := self._entered.get()) is not None:
            while not (self._barrier.is_lost or under_way.has_ended()):
                if why := under_way.nccl_error():
                    # The barrier may learn who is lost, and why, a moment later.
                    self._barrier.wait_lost(_LOSS_S)
                    self._barrier.lose(why)
                    self._leave()
                time.sleep(_LOOK_S)


class Broadcast:
    """A broadcast of this end. Broadcasts of one communicator end in their order.

    Args:
        barrier: the agreement with the other ends.
        entry: the broadcast's entry there.
        memories: the broadcast tensors.
        begins: the context in which the broadcast is queued.

    Attributes:
        entry, memories, begins: as given.
        work: torch's handle of the queued work, once entered.
        end: the event at its end, once entered.
        is_entered: set when the broadcast was entered, or never will be.
    """

    def __init__(
        self,
        barrier: EntryBarrier,
        entry: CollectiveEntry,
        memories: Sequence[Any],
        begins: AbstractContextManager[None],
    ) -> None:
        self.entry = entry
        self.memories = memories  # keeps them alive: NCCL has only their addresses
        self.begins = begins
        self.work: Any = None
        self.end: Any = None
        self.is_entered = threading.Event()
        self._barrier = barrier
        self._is_over = False

    def wait(self) -> None:
        """Waits until this end has done its part on its GPU.

        Raises:
            RuntimeError: another end is gone or silent, or this one was closed. This end is closed
                then.
        """
        while not self.is_entered.wait(_STUCK_S):
            self._barrier.require()
        if not self._is_over and self.end is not None:
            self.end.synchronize()
        if not self.has_ended():
            self._barrier.require()

    def has_ended(self) -> bool:
        """Returns whether this end has done its part; an aborted broadcast never has."""
        if self._is_over or self.end is None:
            return self._is_over
        # In this order: an aborted broadcast looks like one that has ended.
        if self.end.query() and not self._barrier.is_lost:
            self._is_over = True
            self._barrier.finish(self.entry)
        return self._is_over

    def nccl_error(self) -> str:
        """Returns NCCL's error of an entered broadcast, whose kernel may still run; else empty."""
        if self.work is not None and self.work.is_completed() and not self.has_ended():
            try:
                self.work.wait()
            except RuntimeError as error:
                return rendezvous.reason(error)
        return ""


class _Gpu:
    """A GPU on which broadcasts are queued; see :class:`Device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entering, self._waiting = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def after_queued(self) -> AbstractContextManager[None]:
        queued = torch.cuda.current_stream(self._device).record_event()

        @contextlib.contextmanager
        def begins() -> Iterator[None]:
            with torch.cuda.device(self._device), torch.cuda.stream(self._entering):
                self._entering.wait_event(queued)
                yield

        return begins()

    def end_of(self, work: Any) -> Any:
        with torch.cuda.device(self._device), torch.cuda.stream(self._waiting):
            work.block_current_stream()  # and not this thread
            ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ended.record()
        return ended


def meet(
    init: NcclInit, place: RankAssignment, device: torch.device, point: MeetingPoint | None = None
) -> NcclCommunicator:
    """Connects this end when all ends are there, and returns its communicator.

    On return all ends have exchanged a first byte.

    Args:
        init: the sender's params.
        place: this end's rank.
        device: this end's GPU. No other end of this host may be on it.
        point: where the ends meet, in the sender.

    Raises:
        OSError: no store listens there.
        RuntimeError: the store went away, an end did not come within ``init.timeout_ms``, two ends
            are on one GPU, or NCCL can't connect them.
    """
    timeout_s = init.timeout_ms / 1000
    deadline = time.monotonic() + timeout_s
    # NCCL waits without end for a missing end. So it begins when all are there.
    barrier, store = rendezvous.meet(
        init, place, point, _gpu_identity(device_uuid(device)), SILENCE_S
    )
    try:
        _check_distinct_gpus([each.split(" ", 1)[1] for each in barrier.greetings])
        part = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
        group = _new_group(part, place, timeout_s)
    except BaseException:
        barrier.close()
        raise
    made = NcclCommunicator(group, barrier, _Gpu(device))

    def connect() -> None:
        with torch.cuda.device(device):
            group.eager_connect_single_device(torch.device(device))
            # The first operation makes NCCL set up its buffers, now rather than in a chunk.
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            made.broadcast([first], deadline - time.monotonic())

    try:
        _call_within(deadline - time.monotonic(), connect)
    except TimeoutError as error:
        made.close()
        raise RuntimeError(f"NCCL did not connect all ranks within {timeout_s:g} s") from error
    except BaseException:
        made.close()
        raise
    return made


def _gpu_identity(uuid: str) -> str:
    """Returns the GPU's UUID, with the host's name that NCCL uses if it was set."""
    host = os.environ.get(_HOST, "")
    return f"{uuid} of {host}" if host else uuid


def _check_distinct_gpus(seats: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        if seat in seen:
            raise RuntimeError(
                f"ranks {seen[seat]} and {rank} are both on GPU {seat}, which NCCL can't do: "
                "use ipc where trainer and engine share a GPU, shm or gloo otherwise"
            )
        seen[seat] = rank


def _new_group(store: Any, place: RankAssignment, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 - there is no other way
    with _group_lock, _environment(_NO_WATCHDOG, "1"):
        return dist.ProcessGroupNCCL(store, place.rank, place.world_size, options)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _call_within(timeout_s: float, call: Callable[[], object]) -> None:
    """Makes a call in a thread, which is abandoned if the call takes too long.

    Raises:
        TimeoutError: the call took longer than ``timeout_s``.
        BaseException: whatever the call raises.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            failed.append(error)

    thread = threading.Thread(target=run, name="wavebus-nccl", daemon=True)
    thread.start()
    thread.join(max(timeout_s, 0))
    if thread.is_alive():
        raise TimeoutError
    if failed:
        raise failed[0]
