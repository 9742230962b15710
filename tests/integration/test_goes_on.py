"""A trainer that lost what it began, to an interrupt or to the bus, goes on with the next."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from signal import SIGCONT, SIGINT, SIGSTOP
from typing import TYPE_CHECKING

import pytest

from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar.engine import EngineInfo
from tests.integration.conftest import TIMES
from tests.support.procs import ROOT, Proc, wavebus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.messages import PauseMode, SleepLevel

TIMEOUT_S = 120.0


class Held(StubEngine):
    """Its pauses return when they are let go; all calls that matter here are counted."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pausing = asyncio.Event()
        self.let_go = asyncio.Event()

    async def start(self) -> EngineInfo:
        return EngineInfo("stub", "test", "none", 0, 1, 1, ("shm",), "", can_sleep=True)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        self.calls.append("pause")
        self.pausing.set()
        await self.let_go.wait()
        return 0

    async def resume(self) -> None:
        self.calls.append("resume")

    async def sleep(self, level: SleepLevel) -> None:  # noqa: ARG002
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")


@contextlib.asynccontextmanager
async def a_trainer(engine: Held, what: str) -> AsyncIterator[tuple[Proc, Proc]]:
    """It and its broker, both processes of their own."""
    script = str(ROOT / "tests/support/goes_on.py")
    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", *TIMES) as broker:
        address = await asyncio.to_thread(broker.first_line)
        async with Sidecar(engine, broker=address, name="engine"):
            argv = (sys.executable, script, address, what)
            with Proc(*argv, stdin=subprocess.PIPE) as trainer:
                yield trainer, broker


def go_on(trainer: Proc) -> None:
    """Let it take its next step, which would change the calls before they are looked at."""
    assert trainer.process.stdin is not None
    trainer.process.stdin.write("\n")
    trainer.process.stdin.flush()


@pytest.mark.parametrize("what", ["paused", "update"])
def test_an_interrupt_undoes_what_was_begun(what: str) -> None:
    """The pause that was under way is completed and resumed; and the trainer goes on."""

    async def scenario() -> None:
        engine = Held()
        async with a_trainer(engine, what) as (trainer, _):
            await engine.pausing.wait()
            trainer.signal(SIGINT)
            assert await asyncio.to_thread(trainer.first_line) == "interrupted"
            engine.let_go.set()
            assert await asyncio.to_thread(trainer.first_line) == "KeyboardInterrupt"
            assert engine.calls == ["pause", "resume"]
            go_on(trainer)
            assert int(await asyncio.to_thread(trainer.first_line)) >= 1
            assert engine.calls == ["pause", "resume"] * 2
            assert await asyncio.to_thread(trainer.wait) == 0

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.ci
def test_a_trainer_that_was_missed_in_its_sleep_updates_again() -> None:
    """The bus took it for dead, and woke its engines: the first update hears that, those after it
    make pauses of their own. The sleep's end is refused, since it is over."""

    async def scenario() -> None:
        engine = Held()
        engine.let_go.set()
        async with a_trainer(engine, "asleep") as (trainer, broker):
            assert await asyncio.to_thread(trainer.first_line) == "asleep"
            trainer.signal(SIGSTOP)
            await asyncio.to_thread(broker.wait_event, "peer_lost", peer="trainer")
            await asyncio.to_thread(broker.wait_event, "resumed")
            trainer.signal(SIGCONT)
            go_on(trainer)  # in its sleep
            go_on(trainer)  # after it
            told = [await asyncio.to_thread(trainer.first_line) for _ in range(4)]
            assert {told[0], told[2]} <= {"UpdateFailed", "Refused"}
            assert 1 <= int(told[1]) < int(told[3])
            assert engine.calls == ["pause", "sleep", "wake", *["pause", "resume"] * 2]
            assert await asyncio.to_thread(trainer.wait) == 0

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
