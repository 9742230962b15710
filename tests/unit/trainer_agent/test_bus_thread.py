"""Interrupts of a caller without an event loop: what it began is undone before it goes on."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import anyio
import pytest
from anyio.from_thread import BlockingPortal

from tests.support.interrupts import waits_for_a_future
from tests.support.procs import ROOT
from trainer_agent._bus_thread import BusThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

LONG_S = 60.0  # nobody waits for it, unless an interrupt is not heard


class Client:
    """Tells in ``seen`` what of it ran, how it ended, and what its block was left with."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to leave."""

    async def work(self) -> None:
        with self._told("work"):
            await anyio.sleep(LONG_S)

    @contextlib.asynccontextmanager
    async def block(self, *, endless: bool = True) -> AsyncIterator[str]:
        with self._told("enter"):
            await (anyio.sleep(LONG_S) if endless else anyio.lowlevel.checkpoint())
        with self._told("body"):
            yield "value"
        with self._told("leave"):
            await anyio.lowlevel.checkpoint()

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        self.seen.append(what)
        try:
            yield
        except BaseException as error:
            self.seen.append(type(error).__name__)
            raise


class Thread(BusThread[Client]):
    def __init__(self, client: Client) -> None:
        super().__init__(lambda: client)
        self.client = client

    def work(self) -> None:
        self._call(self.client.work)

    @contextlib.contextmanager
    def block(self, *, endless: bool = True) -> Iterator[str]:
        with self._block(self.client.block(endless=endless)) as value:
            yield value


def interrupt(monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """The next task that is started interrupts its caller, before or after it is: the caller has
    no handle of it yet."""
    start: Callable[..., Any] = BlockingPortal.start_task_soon

    @functools.wraps(start)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        if not before:
            start(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockingPortal, "start_task_soon", interrupted)


@pytest.mark.parametrize("before", [False, True])
def test_a_call_that_is_interrupted_while_it_is_started_has_ended(
    monkeypatch: pytest.MonkeyPatch,
    before: bool,
) -> None:
    with Thread(Client()) as thread:
        interrupt(monkeypatch, before=before)
        with pytest.raises(KeyboardInterrupt):
            thread.work()
        assert thread.client.seen == ([] if before else ["work", "CancelledError"])


def test_a_signal_that_another_thread_receives_interrupts_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It wakes nobody who waits for a lock. A stopped process that goes on, and a signal that comes
    just before the wait, do the same."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Thread(Client()) as thread:
            work, caller = thread.client.work, threading.get_ident()

            async def interrupting() -> None:
                while not waits_for_a_future(caller):  # noqa: ASYNC110 - no event tells
                    await anyio.sleep(0.01)
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                await work()

            monkeypatch.setattr(thread.client, "work", interrupting)
            with pytest.raises(KeyboardInterrupt):
                thread.work()
            assert thread.client.seen == ["work", "CancelledError"]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("where", ["__aenter__", "__aexit__"])
def test_a_signal_that_another_thread_receives_ends_connecting_and_closing(where: str) -> None:
    """A broker that does not answer takes long; the caller does not wait for that."""
    caller, ended = threading.get_ident(), list[str]()

    async def interrupting(self: Client, *_: object) -> Client:
        while not waits_for_a_future(caller):  # noqa: ASYNC110 - no event tells
            await anyio.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        try:
            await anyio.sleep(LONG_S)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise
        ended.append("it was waited for")
        return self

    slow: Any = type("Slow", (Client,), {where: interrupting})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = Thread(slow())
        with pytest.raises(KeyboardInterrupt), thread:
            assert where == "__aexit__"
        assert ended == ["CancelledError"]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("before", [False, True])
def test_a_block_that_is_interrupted_while_it_is_entered_is_left(
    monkeypatch: pytest.MonkeyPatch,
    before: bool,
) -> None:
    with Thread(Client()) as thread:
        interrupt(monkeypatch, before=before)
        with pytest.raises(KeyboardInterrupt), thread.block():
            pytest.fail("it was entered")
        assert thread.client.seen == ([] if before else ["enter", "CancelledError"])


def test_a_block_that_is_interrupted_while_it_is_left_is_left_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Thread(Client()) as thread:
        with pytest.raises(KeyboardInterrupt), thread.block(endless=False):
            interrupt(monkeypatch, before=False)
        assert thread.client.seen == ["enter", "body", "leave"]


def test_a_block_hears_the_error_of_its_body() -> None:
    with Thread(Client()) as thread:
        with pytest.raises(KeyboardInterrupt), thread.block(endless=False):
            raise KeyboardInterrupt
        assert thread.client.seen == ["enter", "body", "KeyboardInterrupt"]
        thread.client.seen.clear()
        with thread.block(endless=False) as value:
            assert value == "value"
        assert thread.client.seen == ["enter", "body", "leave"]


INTERRUPTED = """
import signal, sys, threading, traceback
import anyio
from trainer_agent import _bus_thread as bus_thread

begins, heard, main = anyio.run, threading.Event(), threading.main_thread().ident

def run(serve):
    while not any(f.name == "result" for f in traceback.extract_stack(sys._current_frames()[main])):
        pass  # until the main thread waits for the loop
    signal.pthread_kill(main, signal.SIGINT)
    heard.wait()
    begins(serve)

def interrupt(*_):
    heard.set()
    raise KeyboardInterrupt

anyio.run = run
signal.signal(signal.SIGINT, interrupt)
try:
    with bus_thread.event_loop_thread():
        print("the block was entered")
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
"""


def test_an_interrupt_while_the_loop_starts_ends_its_thread() -> None:
    """In a process of its own, which would not end by itself."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["interrupted 1"], done.stderr
