"""Where the ends of a communicator find each other, and how an end of NCCL's kind waits there.

The waiting is tried over gloo, which has the same calls: what is ours in it knows no GPU.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

from bus.errors import WavebusError
from bus.weight_transfer import nccl_communicator, rendezvous
from bus.weight_transfer.allocation import RankAssignment

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCAL = "127.0.0.1"
LIMIT_S = 30.0
DUPLICATE = """NCCL error in: /x/NCCLUtils.cpp:77, invalid usage, NCCL version 2.29.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0
"""


class AsNccl:
    """A group that ends what is under way when it is aborted, as NCCL's kernels do."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._aborted = threading.Event()
        self.error: RuntimeError | None = None

    def broadcast(self, memories: list[torch.Tensor], options: Any) -> UnderWay:
        return UnderWay(self, self._group.broadcast(memories, options), self._aborted)

    def abort(self) -> None:
        self._aborted.set()
        self._group.abort()


class UnderWay:
    """What it has queued: of gloo's, and as NCCL's it is completed when the group has an error."""

    def __init__(self, group: AsNccl, work: Any, aborted: threading.Event) -> None:
        self._group, self._work, self._aborted = group, work, aborted

    def is_completed(self) -> bool:
        return self._group.error is not None or self.ended()

    def ended(self) -> bool:
        return self._aborted.is_set() or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._group.error is not None:
            raise self._group.error


class End:
    """As a CUDA event behind it."""

    def __init__(self, work: UnderWay) -> None:
        self.query = work.ended

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.001)


class Meeting:
    """A store, and ways into it."""

    def __init__(self) -> None:
        self.kept: Any = rendezvous.open_store(LOCAL, 30)
        self.port: int = self.kept.port

    def enter(self, communicator: int = 1) -> Any:
        return rendezvous.connect_store(LOCAL, self.port, communicator, 30)

    def group(self, rank: int) -> nccl_communicator.NcclCommunicator:
        """An end that has met one other, over gloo."""
        store = self.enter()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=30)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOCAL)]
        options._threads = 1  # one after the other, as on a stream
        group = AsNccl(dist.ProcessGroupGloo(store, rank, 2, options))
        return nccl_communicator.NcclCommunicator(group, store, End)

    def both(self) -> tuple[nccl_communicator.NcclCommunicator, nccl_communicator.NcclCommunicator]:
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(self.group, (0, 1))
        return first, second


class Clock:
    """What an end takes for the time; it stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._read = threading.Condition()
        self._reads = 0

    def monotonic(self) -> float:
        with self._read:
            self._reads += 1
            self._read.notify_all()
        return self.now_s

    def wait_for_reads(self, reads: int) -> None:
        """So many more. Each look at what is under way is one."""
        with self._read:
            reads += self._reads
            assert self._read.wait_for(lambda: self._reads >= reads, LIMIT_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(nccl_communicator, "time", made)
    return made


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.kept = None


def test_patience_grows_with_the_chunk() -> None:
    """Thirty seconds, and one more per 10 MB."""
    assert rendezvous.chunk_timeout_s(0) == 30
    assert rendezvous.chunk_timeout_s(64_000_000) == 36


def test_the_store_listens_on_its_address_alone(meeting: Meeting) -> None:
    """Left to itself it would listen on all of them."""
    with socket.create_connection((LOCAL, meeting.port)):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port))


def test_an_address_of_another_host_is_no_place_for_a_store() -> None:
    with pytest.raises(WavebusError, match=r"192\.0\.2\.1: .*assign requested address"):
        rendezvous.open_store("192.0.2.1", 30)


def test_everybody_hears_everybodys_word(meeting: Meeting) -> None:
    def call(rank: int) -> list[str]:
        return rendezvous.gather_messages(
            meeting.enter(), RankAssignment(1, 3, rank), f"gpu {rank}", 30
        )

    with ThreadPoolExecutor(3) as threads:
        heard = list(threads.map(call, range(3)))
    assert heard == [["gpu 0", "gpu 1", "gpu 2"]] * 3


def test_communicators_in_one_store_do_not_meet(meeting: Meeting) -> None:
    """One end has the number of another, so that nobody comes."""
    rendezvous.gather_messages(meeting.enter(7), RankAssignment(7, 1, 0), "x", 5)
    with pytest.raises(RuntimeError):
        rendezvous.gather_messages(meeting.enter(8), RankAssignment(8, 2, 1), "x", 0.2)


def test_who_waits_for_the_roll_call_is_freed_when_the_store_goes(meeting: Meeting) -> None:
    store = meeting.enter()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            rendezvous.gather_messages, store, RankAssignment(1, 2, 1), "x", 30
        )
        meeting.enter().wait(["here-1"], timedelta(seconds=30))
        meeting.kept = None
        with pytest.raises(RuntimeError):
            waiting.result(10)
    assert not rendezvous.is_store_alive(store)


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


def test_a_broadcast_ends_when_everybody_has_taken_part(meeting: Meeting) -> None:
    first, second = meeting.both()
    sent, got = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(second.broadcast, [got], 10)
        first.broadcast([sent], 10)
        receiving.result()
    assert torch.equal(sent, got)
    first.close()
    second.close()


def test_a_silent_end_ends_the_wait_in_time(meeting: Meeting) -> None:
    """And the communicator with it."""
    first, second = meeting.both()
    with pytest.raises(RuntimeError, match=r"not everybody took part within 0\.2 s"):
        second.broadcast([torch.zeros(1, dtype=torch.uint8)], 0.2)
    with pytest.raises(RuntimeError, match="it is closed"):
        second.broadcast([torch.zeros(1, dtype=torch.uint8)], 0.2)
    first.close()


def test_broadcasts_are_queued_behind_each_other(meeting: Meeting) -> None:
    """Before the first has been taken part in by all."""
    first, second = meeting.both()
    sent = [torch.full((9,), number, dtype=torch.uint8) for number in range(3)]
    got = [torch.zeros(9, dtype=torch.uint8) for _ in sent]
    coming = [second.launch([memory], 10) for memory in got]
    leaving = [first.launch([memory], 10) for memory in sent]
    for under_way in (*reversed(coming), *leaving):
        under_way.wait()
    assert all(map(torch.equal, sent, got))
    first.close()
    second.close()


def test_each_broadcast_has_its_time_from_when_the_one_before_has_ended(
    meeting: Meeting, clock: Clock
) -> None:
    """However long ago it was queued; and nobody needs to wait for it."""
    first, second = meeting.both()
    got = [torch.zeros(1, dtype=torch.uint8) for _ in range(2)]
    coming = [second.launch([memory], 1.5) for memory in got]
    clock.now_s = 1.0
    first.broadcast([torch.ones(1, dtype=torch.uint8)], 10)
    coming[0].wait()
    while len(second._in_flight) > 1:  # it is to be seen that the first has ended
        clock.wait_for_reads(1)
    clock.now_s = 2.4
    clock.wait_for_reads(3)  # the first may still be of before
    assert not second._closed.is_set()
    clock.now_s = 2.6
    assert second._closed.wait(LIMIT_S)
    with pytest.raises(RuntimeError, match=r"not everybody took part within 1\.5 s"):
        coming[1].wait()
    first.close()


def test_an_error_of_the_group_ends_the_wait(meeting: Meeting) -> None:
    """Of a link that is gone NCCL hears, and its kernel goes on."""
    first, second = meeting.both()
    coming = second.launch([torch.zeros(1, dtype=torch.uint8)], 30)
    cast("AsNccl", second._group).error = RuntimeError("Last error:\nthe link is down")
    with pytest.raises(RuntimeError, match="the link is down"):
        coming.wait()
    first.close()


def test_an_end_that_is_closed_leaves_its_broadcast(meeting: Meeting) -> None:
    """By another thread: that of an agent whose update has failed."""
    first, second = meeting.both()
    closing = threading.Timer(0.2, second.close)
    closing.start()
    with pytest.raises(RuntimeError):
        second.broadcast([torch.zeros(1 << 20, dtype=torch.uint8)], 30)
    closing.join()
    first.close()


def test_an_end_leaves_its_broadcast_when_the_trainers_store_is_gone(meeting: Meeting) -> None:
    """What NCCL itself may never notice."""
    first, second = meeting.both()
    closing = threading.Timer(0.1, lambda: setattr(meeting, "kept", None))
    closing.start()
    with pytest.raises(RuntimeError, match="the trainer's end is closed or gone"):
        second.broadcast([torch.zeros(1, dtype=torch.uint8)], 30)
    first.close()


def test_a_call_that_never_returns_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError):
        nccl_communicator._call_within(0.05, never.wait)
    never.set()
    with pytest.raises(ZeroDivisionError):
        nccl_communicator._call_within(5, lambda: 1 // 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (DUPLICATE, "Duplicate GPU detected : rank 1 and rank 0"),
        ("[/x/y.cpp:5] Connection closed. This is typically", "Connection closed"),
        ("Last error:\n", "Last error:"),
        ("", "RuntimeError"),
    ],
)
def test_nccls_last_word_is_told(text: str, told: str) -> None:
    assert nccl_communicator.reason(RuntimeError(text)) == told
