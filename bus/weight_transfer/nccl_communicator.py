"""One end of an NCCL communicator, the same on both sides.

It is torch's ``ProcessGroupNCCL``, beside whatever groups the process has, and none of its own
ways of failing: a watchdog that ends the process, or waits without end. Here an end waits with a
deadline, looks whether the trainer is still there, can be closed meanwhile, and raises.

Who waits, does it in CUDA, without Python's lock: on an engine that lock is what its steps need.
A thread of the communicator's looks on, twice a second; where there is nothing to wait for any
more, it closes the communicator, which ends the wait, and the kernel.

A peer that dies is not noticed by NCCL itself where GPUs read each other's memory (NVLink): its
kernel goes on waiting. So the bus tells: an engine's loss fails the trainer's update, which closes
its end and its store; and who finds that store gone leaves too.

Callers pass ``torch`` and ``torch.distributed`` in, so that a test can pass others.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from bus.weight_transfer import rendezvous
from bus.weight_transfer.cuda import device_uuid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bus.weight_transfer.allocation import RankAssignment
    from bus.weight_transfer.formats import NcclInit

# torch reads it when a group is made. With it there is no watchdog for the group: a thread that
# takes the process down when an operation fails, or takes longer than the group's timeout.
_NO_WATCHDOG: Final = "TORCH_NCCL_BLOCKING_WAIT"
# What NCCL takes for the host's name, where it is set.
_HOST: Final = "NCCL_HOSTID"
_group_lock = threading.Lock()

# How often it is looked whether the trainer is still there, and whether it took too long.
_WATCH_INTERVAL_S: Final = 0.5
# Aborting takes milliseconds; who waits for it must not wait for ever.
_ABORT_S: Final = 10.0


class NcclCommunicator:
    """An end that has met the others. Used by one thread at a time; waited in and closed by any.

    Args:
        mark: of what was queued, the end: what has ``synchronize()`` and ``query()`` as a CUDA
            event has. It is only made when somebody asks: of several broadcasts, for the last.
    """

    def __init__(self, dist: Any, group: Any, store: Any, mark: Callable[[Any], Any]) -> None:
        self.mark = mark
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._group = group
        self._store = store
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._in_flight: deque[Broadcast] = deque()
        self._launched = 0
        self.completed = 0  # so many have ended, as who has waited for the last of them knows
        self._why = "it was closed meanwhile"
        threading.Thread(target=self._watch, name="wavebus-nccl-watch", daemon=True).start()

    def launch(self, memories: Sequence[Any], timeout_s: float) -> Broadcast:
        """Queue a broadcast from rank 0 to all, behind what the current stream was asked before.

        Args:
            memories: contiguous tensors of bytes on this end's GPU, as many and as long as at
                every other end. They must stay until it has ended.
            timeout_s: how long it may take, from when the one before has ended. Then this end is
                closed, whether anybody waits or not.

        Raises:
            RuntimeError: it is closed, or is now.
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
        """:meth:`launch`, and :meth:`Broadcast.wait`."""
        self.launch(memories, timeout_s).wait()

    def close(self) -> None:
        """Leave at once, whatever goes on, and free what NCCL holds on the GPU."""
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
            # Not shutdown(), which on one host waits for the others to do the same.
            with contextlib.suppress(RuntimeError, TimeoutError):
                _call_within(_ABORT_S, self._group.abort)

    def check_open(self) -> None:
        """It was not closed.

        Raises:
            RuntimeError: why it was.
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
    """One on its way, the ``number``-th of its owner's: they end in that order."""

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
        self._memories = memories  # NCCL has their addresses, and nothing more
        self._work = work
        self._end: Any = None
        self._timeout_s = timeout_s
        self._launched_s = time.monotonic()

    def wait(self) -> None:
        """Return when this end has done its part on its GPU.

        Raises:
            RuntimeError: an end is gone or silent, or this one was closed. It is closed then.
        """
        self._owner.check_open()
        if self._number > self._owner.completed:
            self._end_event().synchronize()
            self._owner.completed = max(self._owner.completed, self._number)
        self._owner.check_open()  # what was aborted looks like what has ended

    @property
    def has_ended(self) -> bool:
        """Whether this end has done its part, or was aborted."""
        return self._number <= self._owner.completed or bool(self._end_event().query())

    def _end_event(self) -> Any:
        if self._end is None:
            self._end = self._owner.mark(self._work)
        return self._end

    def failure_reason(self, first_since_s: float) -> str:
        """Why there is nothing to wait for, if so.

        Args:
            first_since_s: when it became the next to end.
        """
        since_s = max(first_since_s, self._launched_s)
        if time.monotonic() >= since_s + self._timeout_s:
            return f"not everybody took part within {self._timeout_s:g} s"
        if self._work.is_completed() and not self.has_ended:
            try:  # it has an error: the kernel goes on
                self._work.wait()
            except RuntimeError as error:
                return reason(error)
        return ""


def meet(
    torch: Any, dist: Any, init: NcclInit, place: RankAssignment, device: Any
) -> NcclCommunicator:
    """This end, when all are there and have exchanged a first byte.

    Args:
        device: this end's GPU; no other end of this host may be on it.

    Raises:
        OSError: the store is not there.
        RuntimeError: it went away, not everybody came within ``init.timeout_ms``, two ends are
            on one GPU, or NCCL can't connect them.
    """
    timeout_s = init.timeout_ms / 1000
    deadline = time.monotonic() + timeout_s
    store = rendezvous.connect_store(dist, init.host, init.port, place.communicator, timeout_s)
    # NCCL waits without end for who doesn't come. So it begins when all are here.
    seats = rendezvous.gather_messages(
        store, place, _gpu_identity(device_uuid(torch, device)), timeout_s
    )
    _check_distinct_gpus(seats)
    group = _new_group(dist, dist.PrefixStore("nccl", store), place, timeout_s)

    waiting = torch.cuda.Stream(device)

    def mark(work: Any) -> Any:
        with torch.cuda.device(device), torch.cuda.stream(waiting):
            work.block_current_stream()  # and not this thread
            ended = torch.cuda.Event(blocking=True)
            ended.record()
        return ended

    made = NcclCommunicator(dist, group, store, mark)

    def connect() -> None:
        with torch.cuda.device(device):
            group.eager_connect_single_device(torch.device(device))
            # What NCCL sets up with the first operation is set up now.
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
    """What NCCL says of an error: its last word, if it has one."""
    _, found, last = str(error).partition("Last error:")
    lines = [line.strip() for line in last.splitlines() if line.strip()] if found else []
    return lines[0] if lines else rendezvous.reason(error)


def _gpu_identity(uuid: str) -> str:
    """Where NCCL sees this end: on a GPU of a host, of whose name it can be told another."""
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


def _new_group(dist: Any, store: Any, place: RankAssignment, timeout_s: float) -> Any:
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
    """Make a call that may never return; who doesn't is left behind.

    Raises:
        TimeoutError: it took longer. And whatever the call raises.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is raised by who waits
            failed.append(error)

    thread = threading.Thread(target=run, name="wavebus-nccl", daemon=True)
    thread.start()
    thread.join(max(timeout_s, 0))
    if thread.is_alive():
        raise TimeoutError
    if failed:
        raise failed[0]
