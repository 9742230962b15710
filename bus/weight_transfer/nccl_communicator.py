"""One end of an NCCL communicator, the same on both sides.

It uses torch's ``ProcessGroupNCCL``, beside any other groups of the process. torch handles failures
by a watchdog that ends the process, or by a wait without end. Here an end waits with a deadline,
checks that the trainer is still there, can be closed meanwhile, and raises.

A wait happens in CUDA, without Python's lock, which the engine's steps need. A thread of the
communicator checks twice a second whether the wait can still succeed. If not, the thread closes the
communicator, which ends the wait and the kernel.

NCCL does not notice a dead peer where GPUs read each other's memory (NVLink): its kernel keeps
waiting. So the bus reports the loss of an engine. The trainer's update then fails and the trainer
closes its end and its store. An end that finds the store gone leaves too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from bus.weight_transfer import rendezvous
from bus.weight_transfer.cuda import device_uuid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bus.weight_transfer.allocation import RankAssignment
    from bus.weight_transfer.formats import NcclInit

# torch reads this variable when a group is made. If set, the group has no watchdog thread. That
# thread would end the process if an operation failed or took longer than the group's timeout.
_NO_WATCHDOG: Final = "TORCH_NCCL_BLOCKING_WAIT"
# If set, NCCL takes it for the host's name.
_HOST: Final = "NCCL_HOSTID"
_group_lock = threading.Lock()

# How often the trainer's store and the deadline are checked.
_WATCH_INTERVAL_S: Final = 0.5
# Aborting takes milliseconds, but could hang.
_ABORT_S: Final = 10.0


class NcclCommunicator:
    """One connected end of a communicator. One thread uses it; any thread may wait or close it.

    Args:
        group: the ``ProcessGroupNCCL``.
        store: the communicator's part of the trainer's store.
        mark: makes, for queued work, an event with ``synchronize()`` and ``query()``, like a CUDA
            event. It is called when a thread first waits for a broadcast, or checks whether the
            broadcast has ended.

    Attributes:
        completed: how many broadcasts have ended, as far as waits have shown.
    """

    def __init__(self, group: Any, store: Any, mark: Callable[[Any], Any]) -> None:
        self.mark = mark
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._group = group
        self._store = store
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._in_flight: deque[Broadcast] = deque()
        self._launched = 0
        self.completed = 0
        self._why = "it was closed meanwhile"
        threading.Thread(target=self._watch, name="wavebus-nccl-watch", daemon=True).start()

    def launch(self, memories: Sequence[Any], timeout_s: float) -> Broadcast:
        """Queues a broadcast from rank 0 to all, behind the current stream's earlier work.

        Args:
            memories: contiguous uint8 tensors on this end's GPU, as many and as long as at every
                other end. They must stay until the broadcast has ended.
            timeout_s: how long the broadcast may take after the one before has ended, in seconds.
                Then this end is closed, whether anybody waits or not.

        Raises:
            RuntimeError: this end is closed, or is closed by this failure.
        """
        if self._closed.is_set():
            raise RuntimeError("it is closed")
        try:
            work = self._broadcast(memories)
            self._launched += 1
            under_way = Broadcast(self, self._launched, memories, work, timeout_s)
        except RuntimeError:
            self.close()
            raise
        self._in_flight.append(under_way)
        return under_way

    def broadcast(self, memories: Sequence[Any], timeout_s: float) -> None:
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
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
            # Not shutdown(): on one host it waits for the other ends' shutdown.
            with contextlib.suppress(RuntimeError, TimeoutError):
                _call_within(_ABORT_S, self._group.abort)

    def check_open(self) -> None:
        """Raises an error if this end was closed.

        Raises:
            RuntimeError: this end was closed; the text says why.
        """
        if self._closed.is_set():
            raise RuntimeError(self._why)

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

    def _watch(self) -> None:
        first_since_s = 0.0
        while not self._closed.wait(_WATCH_INTERVAL_S):
            while self._in_flight and self._in_flight[0].has_ended:
                self._in_flight.popleft()
                first_since_s = time.monotonic()
            if not self._in_flight:
                continue
            why = self._in_flight[0].failure_reason(first_since_s)
            if not (why or rendezvous.is_store_alive(self._store)):
                why = "the trainer's end is closed or gone"
            if why:
                self._why = why
                self.close()


class Broadcast:
    """A broadcast in flight. Broadcasts of one communicator end in their order.

    Args:
        owner: the communicator.
        number: the broadcast's number there, from 1.
        memories: the broadcast tensors.
        work: torch's handle of the queued work.
        timeout_s: how long it may take once all earlier broadcasts have ended, in seconds.
    """

    def __init__(
        self,
        owner: NcclCommunicator,
        number: int,
        memories: Sequence[Any],
        work: Any,
        timeout_s: float,
    ) -> None:
        self._owner = owner
        self._number = number
        self._memories = memories  # keeps them alive: NCCL has only their addresses
        self._work = work
        self._end: Any = None
        self._timeout_s = timeout_s
        self._launched_s = time.monotonic()

    def wait(self) -> None:
        """Waits until this end has done its part on its GPU.

        Raises:
            RuntimeError: another end is gone or silent, or this one was closed. This end is closed
                then.
        """
        self._owner.check_open()
        if self._number > self._owner.completed:
            self._end_event().synchronize()
            self._owner.completed = max(self._owner.completed, self._number)
        self._owner.check_open()  # an aborted broadcast looks like one that has ended

    @property
    def has_ended(self) -> bool:
        """Whether this end has done its part, or was aborted."""
        return self._number <= self._owner.completed or bool(self._end_event().query())

    def _end_event(self) -> Any:
        if self._end is None:
            self._end = self._owner.mark(self._work)
        return self._end

    def failure_reason(self, first_since_s: float) -> str:
        """Returns why the broadcast can't end any more; empty if it still can.

        Args:
            first_since_s: when all earlier broadcasts had ended, in seconds of
                ``time.monotonic()``.
        """
        since_s = max(first_since_s, self._launched_s)
        if time.monotonic() >= since_s + self._timeout_s:
            return f"not everybody took part within {self._timeout_s:g} s"
        if self._work.is_completed() and not self.has_ended:
            try:  # it has an error, though the kernel is still running
                self._work.wait()
            except RuntimeError as error:
                return reason(error)
        return ""


def meet(init: NcclInit, place: RankAssignment, device: torch.device) -> NcclCommunicator:
    """Connects this end when all ends are there, and returns its communicator.

    On return all ends have exchanged a first byte.

    Args:
        init: the sender's params.
        place: this end's rank.
        device: this end's GPU. No other end of this host may be on it.

    Raises:
        OSError: no store listens there.
        RuntimeError: the store went away, an end did not come within ``init.timeout_ms``, two ends
            are on one GPU, or NCCL can't connect them.
    """
    timeout_s = init.timeout_ms / 1000
    deadline = time.monotonic() + timeout_s
    store = rendezvous.connect_store(init.host, init.port, place.communicator, timeout_s)
    # NCCL waits without end for a missing end. So it begins when all are there.
    seats = rendezvous.gather_messages(store, place, _gpu_identity(device_uuid(device)), timeout_s)
    _check_distinct_gpus(seats)
    part = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
    group = _new_group(part, place, timeout_s)

    waiting = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(work: Any) -> Any:
        with torch.cuda.device(device), torch.cuda.stream(waiting):
            work.block_current_stream()  # and not this thread
            ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            ended.record()
        return ended

    made = NcclCommunicator(group, store, mark)

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
        raise RuntimeError(f"NCCL did not connect everybody within {timeout_s:g} s") from error
    except BaseException:
        made.close()
        raise
    return made


def reason(error: Exception) -> str:
    """Returns NCCL's own last line of an error, or torch's text if there is none.

    Args:
        error: what torch has raised.
    """
    _, found, last = str(error).partition("Last error:")
    lines = [line.strip() for line in last.splitlines() if line.strip()] if found else []
    return lines[0] if lines else rendezvous.reason(error)


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
