"""All ends agree before any of them enters a collective; and what ends the agreement.

Real sockets between threads of this process. An end that is silent is a bare connection that
greets as a receiver does, and then answers nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from bus._weight_transfer import barrier_links, entry_barrier
from bus._weight_transfer.allocation import RankAssignment
from bus._weight_transfer.barrier_links import Listener

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus._weight_transfer.entry_barrier import EntryBarrier

LOCAL = "127.0.0.1"
LIMIT_S = 60.0
TOKEN = b"t" * barrier_links.TOKEN_BYTES


class Lost:
    """What is told when an end is lost."""

    def __init__(self, barrier: EntryBarrier) -> None:
        self._told = threading.Event()
        self.reason = ""
        barrier.call_when_lost(self._tell)

    def _tell(self, reason: str) -> None:
        self.reason = reason
        self._told.set()

    def wait(self) -> str:
        assert self._told.wait(LIMIT_S), "nobody was lost"
        return self.reason


class Meeting:
    """A root and receivers; those of ``silent`` ranks are bare connections."""

    def __init__(
        self, size: int, *, silence_s: float = LIMIT_S, silent: tuple[int, ...] = ()
    ) -> None:
        self.listener = Listener(LOCAL, TOKEN, first_ranks={"e0": 1, "e1": 2})
        self.silence_s = silence_s
        self.bare: dict[int, socket.socket] = {}
        self.ends: dict[int, EntryBarrier] = {}
        with ThreadPoolExecutor(size) as threads:
            root = threads.submit(
                self.listener.meet,
                RankAssignment(7, size, 0),
                "root",
                timeout_s=LIMIT_S,
                silence_s=silence_s,
            )
            coming: dict[int, Future[EntryBarrier]] = {}
            for rank in range(1, size):
                if rank in silent:
                    self.bare[rank] = self.greet(rank)
                else:
                    coming[rank] = threads.submit(self.connect, rank, size)
            self.ends[0] = root.result()
            self.ends |= {rank: end.result() for rank, end in coming.items()}

    def connect(self, rank: int, size: int) -> EntryBarrier:
        return barrier_links.connect(
            (LOCAL, self.listener.port),
            TOKEN,
            RankAssignment(7, size, rank),
            f"greeting {rank}",
            timeout_s=LIMIT_S,
            silence_s=self.silence_s,
        )

    def greet(self, rank: int, token: bytes = TOKEN) -> socket.socket:
        bare = socket.create_connection((LOCAL, self.listener.port))
        bare.sendall(barrier_links._HELLO.pack(token, 7, rank, 0))
        return bare

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        for bare in self.bare.values():
            bare.close()


@contextlib.contextmanager
def meeting(
    size: int, *, silence_s: float = LIMIT_S, silent: tuple[int, ...] = ()
) -> Iterator[Meeting]:
    made = Meeting(size, silence_s=silence_s, silent=silent)
    try:
        yield made
    finally:
        made.close()


def take_part(end: EntryBarrier, entered: list[int], *, timeout_s: float = LIMIT_S) -> None:
    """Announces a collective and enters it; ``entered`` gets its number then."""
    entry = end.announce(timeout_s, LIMIT_S)
    with end.entering(entry):
        entered.append(entry.number)
    end.finish(entry)


def test_every_end_gets_every_greeting() -> None:
    with meeting(3) as met:
        expected = ["root", "greeting 1", "greeting 2"]
        assert [end.greetings for end in met.ends.values()] == [expected] * 3


def test_nobody_enters_before_all_have_announced() -> None:
    """Two of three are ready, and stay outside until the third is."""
    with meeting(3) as met, ThreadPoolExecutor(3) as threads:
        entered: list[int] = []
        early = [threads.submit(take_part, met.ends[rank], entered) for rank in (0, 1)]
        late = met.ends[2].announce(LIMIT_S, LIMIT_S)
        assert late.number == 1
        for each in early:
            each.result(LIMIT_S)
        assert entered == [1, 1]
        with met.ends[2].entering(late):
            entered.append(late.number)
        assert entered == [1, 1, 1]


def test_an_end_that_is_not_ready_keeps_all_outside() -> None:
    """The root's patience ends; it names the engine, and nobody has entered."""
    with meeting(3) as met, ThreadPoolExecutor(2) as threads:
        entered: list[int] = []
        waiting = threads.submit(take_part, met.ends[1], entered)
        entry = met.ends[0].announce(LIMIT_S, 0.1)
        with (
            pytest.raises(RuntimeError, match=r"e1, rank 2 \(greeting 2\) did not get ready"),
            met.ends[0].entering(entry),
        ):
            entered.append(0)
        met.ends[0].lose("it gave up")
        with pytest.raises(RuntimeError, match="the trainer's end is closed or gone"):
            waiting.result(LIMIT_S)
        assert entered == []


def test_collectives_are_announced_ahead_and_entered_in_order() -> None:
    with meeting(2) as met, ThreadPoolExecutor(1) as threads:
        root, receiver = met.ends[0], met.ends[1]
        ahead = [receiver.announce(LIMIT_S, LIMIT_S) for _ in range(3)]
        entered: list[int] = []

        def enter() -> None:
            for entry in ahead:
                with receiver.entering(entry):
                    entered.append(entry.number)

        entering = threads.submit(enter)
        for _ in range(3):
            take_part(root, [])
        entering.result(LIMIT_S)
        assert entered == [1, 2, 3]


@pytest.mark.parametrize("gone", [0, 1])
def test_all_ends_are_lost_when_one_is_gone(gone: int) -> None:
    """At once, inside a collective or outside; with three ends two learn it through the root."""
    with meeting(3) as met:
        lost = [Lost(met.ends[rank]) for rank in range(3) if rank != gone]
        met.ends[gone].close()
        told = [each.wait() for each in lost]
        assert told[0] in (
            "e0, rank 1 (greeting 1) is closed or gone",
            "the trainer's end is closed or gone",
        )
        for rank, end in met.ends.items():
            assert end.is_lost, rank
            with pytest.raises(RuntimeError):
                end.announce(1, 1)


def test_a_silent_end_ends_the_collective_for_all() -> None:
    """It said that it would take part, and answers nothing while the others are inside."""
    with meeting(3, silence_s=0.2, silent=(2,)) as met, ThreadPoolExecutor(2) as threads:
        met.bare[2].sendall(entry_barrier._FRAME.pack(entry_barrier._READY, 1))
        lost = [Lost(met.ends[rank]) for rank in (0, 1)]

        def enter(end: EntryBarrier) -> None:
            entry = end.announce(LIMIT_S, LIMIT_S)
            with end.entering(entry):
                pass

        for each in [threads.submit(enter, met.ends[rank]) for rank in (0, 1)]:
            each.result(LIMIT_S)
        assert lost[0].wait() == "e1, rank 2 () has been silent for 0.2 s"
        assert lost[1].wait() == "the trainer's end is closed or gone"


def test_an_end_that_is_done_asks_for_one_that_is_not() -> None:
    """The root has done its part: it asks the silent end because a receiver still waits inside."""
    with meeting(3, silence_s=0.2, silent=(2,)) as met, ThreadPoolExecutor(2) as threads:
        met.bare[2].sendall(entry_barrier._FRAME.pack(entry_barrier._READY, 1))
        lost = Lost(met.ends[1])
        inside = met.ends[1].announce(LIMIT_S, LIMIT_S)

        def enter() -> None:
            with met.ends[1].entering(inside):
                pass

        entering = threads.submit(enter)
        take_part(met.ends[0], [])
        entering.result(LIMIT_S)
        assert lost.wait() == "the trainer's end is closed or gone"


def test_an_end_that_answers_may_be_slow() -> None:
    """A collective that takes far longer than the silence goes on."""
    with meeting(2, silence_s=0.2) as met, ThreadPoolExecutor(1) as threads:
        root, receiver = met.ends[0], met.ends[1]
        entries = [end.announce(LIMIT_S, LIMIT_S) for end in (root, receiver)]

        def enter() -> None:
            with receiver.entering(entries[1]):
                pass

        entering = threads.submit(enter)
        with root.entering(entries[0]):
            pass
        entering.result(LIMIT_S)
        until_s = time.monotonic() + 1.0
        asked = threading.Event()
        while time.monotonic() < until_s:
            assert not root.is_lost
            assert not receiver.is_lost
            asked.wait(0.05)
        root.finish(entries[0])
        receiver.finish(entries[1])
        take_both(met)


def test_an_end_is_asked_ten_times_a_second_at_most() -> None:
    """However soon it answers: a receiver that answers at once counts the questions."""
    with meeting(2, silent=(1,)) as met:
        bare, frame = met.bare[1], entry_barrier._FRAME
        bare.settimeout(LIMIT_S)
        bare.sendall(frame.pack(entry_barrier._READY, 1))
        entry = met.ends[0].announce(LIMIT_S, LIMIT_S)
        with met.ends[0].entering(entry):
            pass
        greetings = barrier_links._LENGTH.unpack(receive(bare, barrier_links._LENGTH.size))[0]
        receive(bare, greetings)
        assert receive(bare, frame.size) == frame.pack(entry_barrier._GO, 1)
        asked_s = []
        for _ in range(4):
            assert receive(bare, frame.size) == frame.pack(entry_barrier._ASK, 0)
            asked_s.append(time.monotonic())
            bare.sendall(frame.pack(entry_barrier._ANSWER, 0))
        link = met.ends[0]._links[1]
        assert link.questioned_s - entry.entered_s >= len(asked_s) * entry_barrier.BEAT_S * 0.99


def receive(bare: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        read += bare.recv(size - len(read))
    return read


def test_a_loss_before_anybody_looks_is_told_to_who_looks_first() -> None:
    with meeting(2) as met:
        first = Lost(met.ends[1])
        met.ends[0].close()
        first.wait()
        assert Lost(met.ends[1]).wait() == first.reason


def test_a_forked_child_keeps_no_connection_open() -> None:
    """The death of its parent is noticed at once, though the child lives on."""
    with meeting(2) as met:
        lost = Lost(met.ends[1])
        done, wait = os.pipe()
        child = os.fork()
        if not child:
            os.close(wait)
            os.read(done, 1)  # until the parent has seen the loss, or has ended
            os._exit(0)
        os.close(done)
        try:
            # What the kernel does when a process dies: its descriptors are closed, no more.
            for link in met.ends[0]._links.values():
                os.dup2(wait, link.connection.fileno())
            assert lost.wait() == "the trainer's end is closed or gone"
        finally:
            os.close(wait)
            for link in met.ends[0]._links.values():
                link.connection.close()
            os.waitpid(child, 0)


def test_an_end_that_sends_something_else_is_lost() -> None:
    with meeting(2, silent=(1,)) as met:
        lost = Lost(met.ends[0])
        met.bare[1].sendall(entry_barrier._FRAME.pack(b"x", 1))
        assert lost.wait() == "e0, rank 1 () is closed or gone"


def take_both(met: Meeting) -> None:
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(take_part, end, []) for end in met.ends.values()]:
            each.result(LIMIT_S)


def test_a_collective_has_its_time_from_when_the_one_before_has_ended() -> None:
    """However long ago it was entered; and nobody needs to wait for it."""
    long_s = 100 * LIMIT_S
    with meeting(2, silence_s=long_s) as met, ThreadPoolExecutor(1) as threads:
        root, receiver = met.ends[0], met.ends[1]
        lost = Lost(receiver)
        first, second = (receiver.announce(timeout_s, LIMIT_S) for timeout_s in (long_s, LIMIT_S))

        def enter() -> None:
            for entry in (first, second):
                with receiver.entering(entry):
                    pass

        entering = threads.submit(enter)
        for _ in range(2):
            take_part(root, [], timeout_s=long_s)
        entering.result(LIMIT_S)
        second.entered_s -= 2 * LIMIT_S
        receiver.finish(first)
        now = time.monotonic()
        receiver._look(now, stood_still=False)
        assert not receiver.is_lost, "its time begins now"
        receiver._look(now + LIMIT_S, stood_still=False)
        assert lost.wait() == "not all ends took part within 60 s"
