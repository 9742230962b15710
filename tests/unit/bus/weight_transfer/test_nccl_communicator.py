"""How an end of an NCCL communicator waits, and what ends the wait.

It is tried over gloo, which has the same calls: what is ours in it knows no GPU.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

from bus._weight_transfer import nccl_communicator, rendezvous
from bus._weight_transfer.allocation import RankAssignment, World
from bus._weight_transfer.formats import GlooInit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from bus._weight_transfer.entry_barrier import EntryBarrier
    from bus._weight_transfer.nccl_communicator import NcclCommunicator

LOCAL = "127.0.0.1"
LIMIT_S = 60.0


class AsNccl:
    """A group that ends what is under way when it is aborted, as NCCL's kernels do."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.aborted = threading.Event()
        self.error: RuntimeError | None = None
        self.entered = 0

    def broadcast(self, memories: list[torch.Tensor], options: Any) -> UnderWay:
        self.entered += 1
        return UnderWay(self, self._group.broadcast(memories, options))

    def abort(self) -> None:
        self.aborted.set()


class UnderWay:
    """What it has queued: of gloo's, and as NCCL's it is completed when the group has an error."""

    def __init__(self, group: AsNccl, work: Any) -> None:
        self._group, self._work = group, work

    def is_completed(self) -> bool:
        return self._group.error is not None or self.ended()

    def ended(self) -> bool:
        return self._group.aborted.is_set() or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._group.error is not None:
            raise self._group.error


class End:
    """As a CUDA event behind it."""

    def __init__(self, work: UnderWay) -> None:
        self.query = work.ended

    def synchronize(self) -> None:
        pause = threading.Event()
        while not self.query():
            pause.wait(0.001)


class Gpu:
    """A GPU that runs everything at once; ``stuck`` is held by whoever makes its calls wait."""

    def __init__(self) -> None:
        self.stuck = threading.Lock()

    def after_queued(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def end_of(self, work: UnderWay) -> End:
        with self.stuck:
            return End(work)


class Meeting:
    """Some ends that have met."""

    def __init__(self, size: int = 2, silence_s: float = LIMIT_S) -> None:
        world = World(1, size, LOCAL)
        self.point = rendezvous.MeetingPoint.open(world, 1, 1)
        self.init = GlooInit(**{**self.point.params, "timeout_ms": 60_000})
        self.size, self.silence_s = size, silence_s
        self.gpus = [Gpu() for _ in range(size)]
        self.groups: dict[int, AsNccl] = {}
        self.barriers: dict[int, EntryBarrier] = {}
        with ThreadPoolExecutor(size) as threads:
            self.ends = list(threads.map(self._end, range(size)))

    def _end(self, rank: int) -> NcclCommunicator:
        place = RankAssignment(1, self.size, rank)
        point = None if rank else self.point
        barrier, store = rendezvous.meet(self.init, place, point, "", self.silence_s)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=LIMIT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOCAL)]
        options._threads = 1  # one after the other, as on a stream
        group = AsNccl(dist.ProcessGroupGloo(store, rank, self.size, options))
        self.groups[rank], self.barriers[rank] = group, barrier
        return nccl_communicator.NcclCommunicator(group, barrier, self.gpus[rank])

    def close(self) -> None:
        for each in self.ends:
            each.close()


@pytest.fixture
def met() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


def byte(value: int = 0) -> torch.Tensor:
    return torch.full((9,), value, dtype=torch.uint8)


def test_two_ends_on_one_gpu_are_refused_by_rank() -> None:
    nccl_communicator._check_distinct_gpus(["a", "b", "c"])
    with pytest.raises(RuntimeError, match="ranks 0 and 2 are both on GPU a"):
        nccl_communicator._check_distinct_gpus(["a", "b", "a"])


def test_a_host_is_the_one_that_nccl_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of different ones may be on one GPU: NCCL goes over the network then."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    here = nccl_communicator._gpu_identity("a")
    monkeypatch.setenv("NCCL_HOSTID", "there")
    there = nccl_communicator._gpu_identity("a")
    nccl_communicator._check_distinct_gpus([here, there])
    with pytest.raises(RuntimeError, match="ranks 1 and 2 are both on GPU a of there"):
        nccl_communicator._check_distinct_gpus([here, there, there])


def test_a_broadcast_ends_when_everybody_has_taken_part(met: Meeting) -> None:
    first, second = met.ends
    sent, got = byte(3), byte()
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(second.broadcast, [got])
        first.broadcast([sent])
        receiving.result(LIMIT_S)
    assert torch.equal(sent, got)


def test_no_end_enters_alone(met: Meeting) -> None:
    """A broadcast that the other end has not announced does not reach the GPU."""
    first, second = met.ends
    coming = second.launch([byte()])
    assert not coming.is_entered.is_set()
    leaving = first.launch([byte(1)])
    coming.wait()
    leaving.wait()
    alone = second.launch([byte()])
    first.close()
    with pytest.raises(RuntimeError, match="the trainer's end is closed or gone"):
        alone.wait()
    assert met.groups[1].entered == 1


def test_broadcasts_are_queued_behind_each_other(met: Meeting) -> None:
    """Before the first has been taken part in by all."""
    first, second = met.ends
    sent = [byte(number) for number in range(3)]
    got = [byte() for _ in sent]
    coming = [second.launch([memory]) for memory in got]
    leaving = [first.launch([memory]) for memory in sent]
    for under_way in (*reversed(coming), *leaving):
        under_way.wait()
    assert all(map(torch.equal, sent, got))


def test_a_broadcast_that_nobody_waits_for_is_noticed_to_end(met: Meeting) -> None:
    """Else its time would run out although it has ended."""
    first, second = met.ends
    leaving, coming = (end.launch([byte()], 1.0) for end in (first, second))
    for barrier in met.barriers.values():
        while barrier._inside or not barrier._last_done_s:
            threading.Event().wait(0.01)
    assert leaving.has_ended()
    assert coming.has_ended()


@pytest.mark.parametrize("gone", [0, 1])
def test_an_end_that_is_gone_aborts_the_others(gone: int) -> None:
    """Inside a broadcast; the third end learns of a receiver's death through the trainer's."""
    met = Meeting(3)
    coming = [met.ends[rank].launch([byte()]) for rank in range(3) if rank != gone]
    met.ends[gone].close()
    for each in coming:
        with pytest.raises(RuntimeError, match="closed or gone"):
            each.wait()
    for rank, group in met.groups.items():
        assert group.aborted.wait(LIMIT_S), rank
    met.close()


def test_the_watcher_aborts_although_the_gpu_answers_no_call() -> None:
    """A call of CUDA waits for the kernel that only the abort ends."""
    met = Meeting()
    with met.gpus[1].stuck:
        coming = met.ends[1].launch([byte()])
        met.ends[0].launch([byte()]).wait()  # so the other end has entered, or is about to
        met.ends[0].close()
        assert met.groups[1].aborted.wait(LIMIT_S)
        with pytest.raises(RuntimeError, match="the trainer's end is closed or gone"):
            coming.wait()
    met.close()


def test_an_error_of_the_group_ends_the_wait(met: Meeting) -> None:
    """Of a link that is gone NCCL hears, and its kernel goes on."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    met.groups[1].error = RuntimeError("Last error:\nthe link is down")
    met.groups[0].broadcast = lambda *_: UnderWay(  # type: ignore[method-assign]
        met.groups[0], cast("Any", Never())
    )
    coming = met.ends[1].launch([byte()])
    met.ends[0].launch([byte()])
    with pytest.raises(RuntimeError, match="the link is down"):
        coming.wait()


class Never:
    """Work that never ends."""

    def is_completed(self) -> bool:
        return False


def test_an_end_that_is_closed_leaves_its_broadcast(met: Meeting) -> None:
    """By another thread: that of an agent whose update has failed."""
    coming = met.ends[1].launch([byte()])
    met.ends[1].close()
    with pytest.raises(RuntimeError, match="it was closed meanwhile"):
        coming.wait()
    with pytest.raises(RuntimeError, match="it was closed meanwhile"):
        met.ends[1].launch([byte()])


def test_a_call_that_never_returns_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError):
        nccl_communicator._call_within(0.05, never.wait)
    never.set()
    with pytest.raises(ZeroDivisionError):
        nccl_communicator._call_within(5, lambda: 1 // 0)
