"""A trainer, a rank of it, or an engine lives and does not go on: nobody waits for it for ever."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from signal import SIGCONT, SIGSTOP
from typing import TYPE_CHECKING

import pytest
import torch

from bus._protocol.core.config import BrokerConfig
from bus._runtime.status_client import fetch_status
from bus.errors import BusTimeout, UpdateFailed
from bus.messages import NackCode
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar._shared_pages import core_status
from tests.support.broker import a_broker
from tests.support.procs import ROOT, Proc
from tests.support.steps import ByStep
from trainer_agent import TrainerAgent
from trainer_agent._weights.source import PairSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from bus.messages import PauseMode
    from bus.operations import ArmManifest, Done, Start

TIMEOUT_S = 60.0
WEIGHTS = {str(number): torch.zeros(4) for number in range(8)}
# On a loaded machine a process may get no processor for some seconds: only what is held is late.
STEP_S = 6.0
STEP_MS = int(STEP_S * 1000)
QUICK = BrokerConfig(
    heartbeat_ms=100, peer_timeout_ms=STEP_MS, retry_ms=50, step_timeout_ms=STEP_MS
)
SCRIPT = str(ROOT / "tests/support/stands_still.py")


class Held(ByStep, StubEngine):
    """The call named ``held`` returns when it is let go."""

    def __init__(self, held: str = "") -> None:
        self.held = held
        self.go_on = asyncio.Event()
        self.running = asyncio.Event()
        self.running.set()

    async def _call(self, name: str) -> None:
        if name == self.held:
            await self.go_on.wait()

    async def on_arm(self, arm: ArmManifest) -> Done:
        await self._call("arm")
        return await self.proceed(arm)

    async def on_start(self, _start: Start) -> None:
        await self._call("start")

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        self.running.clear()
        return 0

    async def resume(self) -> None:
        self.running.set()


class Blocked(PairSource):
    """Gives so many tensors, and then none until it is let go."""

    def __init__(self, given: int) -> None:
        super().__init__(WEIGHTS)
        self.given = given
        self.blocked = threading.Event()
        self.let_go = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(super().__iter__()):
            if number == self.given:
                self.blocked.set()
                assert self.let_go.wait(TIMEOUT_S)
            yield pair


@contextlib.asynccontextmanager
async def a_bus(*engines: Held) -> AsyncIterator[str]:
    async with contextlib.AsyncExitStack() as stack:
        _, address = await stack.enter_async_context(a_broker(config=QUICK))
        for number, engine in enumerate(engines):
            await stack.enter_async_context(Sidecar(engine, broker=address, name=f"e{number}"))
        yield address


@contextlib.asynccontextmanager
async def a_trainer(address: str, engines: int, **options: object) -> AsyncIterator[TrainerAgent]:
    async with TrainerAgent(
        address,
        name="trainer",
        lease_ms=2 * STEP_MS,
        chunk_bytes=16,
        **options,  # type: ignore[arg-type]
    ) as agent:
        await agent.wait_for_engines(engines)
        yield agent


@pytest.mark.ci
@pytest.mark.parametrize("given", [1, 4])
def test_a_source_that_blocks_ends_its_update_by_the_tensor(given: int) -> None:
    """Before the pause, or in it. Engines go on, and take the next update while a thread is still
    in the old source; what that gives later goes nowhere."""

    async def scenario() -> None:
        engine, source = Held(), Blocked(given)
        async with a_bus(engine) as address, a_trainer(address, 1, timeout_s=STEP_S) as agent:
            with pytest.raises(BusTimeout, match=rf"no tensor for .* {given}, of chunk {given}"):
                await agent.update_weights(source, how="paused")
            assert source.blocked.is_set()
            assert (await agent.status()).groups[0].pause == "running"
            assert engine.running.is_set() is (given == 1)  # else it holds a part
            assert await agent.update_weights(WEIGHTS, how="paused") == 2
            assert engine.running.is_set()
            source.let_go.set()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.ci
def test_a_source_that_moves_slowly_lives() -> None:
    """All its tensors take longer than a step may; each takes less."""

    async def scenario() -> None:
        class Slow(PairSource):
            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for pair in super().__iter__():
                    threading.Event().wait(1.2 * STEP_S / len(WEIGHTS))
                    yield pair

        async with a_bus(Held()) as address, a_trainer(address, 1, timeout_s=STEP_S) as agent:
            assert await agent.update_weights(Slow(WEIGHTS), how="paused") == 1

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.ci
def test_a_trainer_that_does_not_go_on_is_given_up_by_the_broker() -> None:
    """It lives, and would wait for longer: the broker's own deadline ends what it holds."""

    async def scenario() -> None:
        engine, source = Held(), Blocked(1)
        async with a_bus(engine) as address, a_trainer(address, 1) as agent:
            pause = agent.paused()
            await pause.__aenter__()
            assert not engine.running.is_set()
            updating = asyncio.ensure_future(agent.update_weights(source))
            await engine.running.wait()
            source.let_go.set()
            with pytest.raises(
                UpdateFailed, match="trainer is alive, but has sent no next step"
            ) as failed:
                await updating
            await pause.__aexit__(None, None, None)
            assert (failed.value.code, failed.value.nack.peer) == (NackCode.TIMEOUT, "trainer")

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.ci
def test_a_source_that_blocks_the_event_loop_pauses_nobody_for_ever() -> None:
    """The trainer is not heard then, so it is lost."""

    async def scenario() -> None:
        engine = Held()
        async with a_bus(engine) as address:
            with Proc(sys.executable, SCRIPT, address, "loop") as trainer:
                assert await asyncio.to_thread(trainer.first_line) == "stands"
                while (await fetch_status(address, timeout_s=TIMEOUT_S)).groups[0].owner:
                    pass
            async with a_trainer(address, 1) as agent:
                assert await agent.update_weights(WEIGHTS, how="paused") == 2
            assert engine.running.is_set()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.ci
def test_a_rank_that_stops_in_a_collective_ends_the_update_by_its_name() -> None:
    """Rank 0 waits for it in its source, and is told as soon as the bus misses it."""

    async def scenario() -> None:
        engine, source = Held(), Blocked(4)
        async with a_bus(engine) as address:
            with Proc(sys.executable, SCRIPT, address, "rank") as other:
                assert await asyncio.to_thread(other.first_line) == "joined"
                async with a_trainer(address, 1, ranks=2) as agent:
                    updating = asyncio.ensure_future(agent.update_weights(source, how="paused"))
                    await asyncio.to_thread(source.blocked.wait)
                    other.signal(SIGSTOP)
                    with pytest.raises(UpdateFailed, match="a rank of the trainer") as failed:
                        await updating
                    assert failed.value.nack.peer == "rank-1"
                    assert (await agent.status()).groups[0].pause == "running"
                    source.let_go.set()
                    other.signal(SIGCONT)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_frozen_core_gets_no_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sidecar lives, and no call of it need be under way; it is routable again when it runs."""
    monkeypatch.setattr(core_status, "_FROZEN_S", 0.3)
    reader = core_status.CoreStatusReader(tmp_path / "page")

    class Paged(Held):
        def core_view(self) -> core_status.CoreStatusView:
            return reader.read()

    async def scenario() -> None:
        core = Proc(sys.executable, str(ROOT / "tests/support/beating_core.py"), str(reader.path))
        with core:
            assert await asyncio.to_thread(core.first_line) == "beats"
            async with a_bus(Paged(), Held()) as address, a_trainer(address, 2) as agent:
                for signal, routable in ((SIGSTOP, ("e1",)), (SIGCONT, ("e0", "e1"))):
                    core.signal(signal)
                    while (await agent.status()).groups[0].routable != routable:
                        pass

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_core_in_a_step_without_end_gets_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its process runs; it is routable again with its next step."""
    monkeypatch.setattr(core_status, "_STEP_MS", 300.0)
    page = core_status.CoreStatusPage(None)

    class Paged(Held):
        def core_view(self) -> core_status.CoreStatusView:
            page.beat()
            return page.view()

    async def scenario() -> None:
        async with a_bus(Paged(), Held()) as address, a_trainer(address, 2) as agent:
            for step in range(core_status._FIRST_STEPS + 1):
                page.count(step=step, wave=0, running=1)
                page.enter("step")
            while (await agent.status()).groups[0].routable != ("e1",):
                pass
            page.enter("work")
            while (await agent.status()).groups[0].routable != ("e0", "e1"):
                pass

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.ci
@pytest.mark.parametrize("held", ["arm", "start"])
def test_an_engine_that_does_not_answer_holds_up_one_step_of_one_update(held: str) -> None:
    """It is named, gets no requests, and is left out of the next update, which takes no longer than
    any other; once it answers, it takes part again."""

    async def scenario() -> None:
        silent, other = Held(held), Held()
        async with a_bus(silent, other) as address, a_trainer(address, 2) as agent:
            for version in (1, 2):
                assert await agent.update_weights(WEIGHTS, how="paused") == version
                assert agent.last_update is not None
                assert agent.last_update.excluded == ("e0",)
                status = (await agent.status()).groups[0]
                assert status.routable == ("e1",)
                assert other.running.is_set()
            silent.held = ""
            silent.go_on.set()
            await agent.wait_for_engines(2)
            assert await agent.update_weights(WEIGHTS, how="paused") == 3
            assert agent.last_update is not None
            assert agent.last_update.excluded == ()
            assert silent.running.is_set()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
