"""A whole bus around engines that do no work: adapters that break, a broker that is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

from bus._weight_transfer.allocation import StagingCapacity
from bus.errors import EngineError, Refused, UpdateFailed, UsageError
from bus.messages import Abort, NackCode
from bus.operations import (
    ArmManifest,
    Done,
    Finish,
    LoadChunk,
    Restore,
    Start,
    SwapStaged,
)
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar.engine import EngineInfo
from tests.support.broker import a_broker
from tests.support.steps import ByStep
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.messages import PauseMode, PdRole, SleepLevel

TIMEOUT_S = 120.0
ROLES: tuple[PdRole, PdRole] = ("prefill", "decode")


class Broken(StubEngine):
    """Drains in `wait` until it is told, and breaks at the call named ``breaks``."""

    def __init__(self, breaks: str) -> None:
        self.breaks = breaks
        self.broke = asyncio.Event()
        self.drained = asyncio.Event()
        self.paused_by: list[PauseMode] = []  # pauses that returned

    def _break(self, call: str) -> None:
        if call == self.breaks:
            self.broke.set()
            raise RuntimeError("a bug of the adapter")

    async def request_ids(self) -> tuple[str, ...]:
        self._break("request_ids")
        return ()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        self._break(mode)
        if mode == "wait":
            await self.drained.wait()
        self.paused_by.append(mode)
        return 0


class Waiting(ByStep, StubEngine):
    """Its swap waits for peer ranks that never come; the first word that calls it off is lost."""

    def __init__(self) -> None:
        self.swaps = asyncio.Event()
        self.called_off = 0
        self._heard = asyncio.Event()

    async def on_arm(self, _arm: ArmManifest) -> Done:
        return Done(room=StagingCapacity(needed_bytes=1))

    async def on_swap(self, _swap: SwapStaged) -> None:
        self.swaps.set()
        await self._heard.wait()
        raise EngineError("called off", code=NackCode.CALLED_OFF)

    async def call_off(self) -> None:
        self.called_off += 1
        if self.called_off > 1:
            self._heard.set()


@contextlib.asynccontextmanager
async def a_bus(engine: StubEngine) -> AsyncIterator[TrainerAgent]:
    async with (
        a_broker() as (_, address),
        Sidecar(engine, broker=address, name="engine"),
        TrainerAgent(address, name="trainer") as agent,
    ):
        await agent.wait_for_engines(1)
        yield agent


def test_a_pause_that_breaks_is_refused() -> None:
    """By the engine's name, with what was raised."""

    async def scenario() -> None:
        async with a_bus(Broken("keep")) as agent:
            with pytest.raises(Refused, match="a bug of the adapter") as refused:
                await agent.paused(mode="keep").__aenter__()
            assert refused.value.code is NackCode.ENGINE_FAILED

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_swap_is_called_off_until_it_is() -> None:
    """A word that overtakes the swap, or is lost, would leave it waiting, and with it all ranks."""

    async def scenario() -> None:
        engine = Waiting()
        async with (
            a_broker() as (_, address),
            Sidecar(engine, broker=address, name="engine") as sidecar,
            TrainerAgent(address, name="trainer") as agent,
        ):
            await agent.wait_for_engines(1)
            update = await agent.send_weights({"weight": torch.zeros(4)}, how="staged")
            await engine.swaps.wait()
            session = sidecar.session
            abort = Abort(session.update.update_id, "as of a broker that knows nothing of it")
            for _ in range(5):  # as it is asked, again and again
                sidecar._perform(session.command(0, session.epoch, abort, 0.0))
            with pytest.raises(UpdateFailed, match="called off"):
                await update
        assert engine.called_off == 2

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.parametrize("breaks", ["request_ids", "abort"])
def test_an_escalation_that_breaks_leaves_the_drain_to_decide(breaks: str) -> None:
    """The pause is made when the `wait` returns, as if nobody had hurried it."""

    async def scenario() -> None:
        engine = Broken(breaks)
        async with a_bus(engine) as agent:

            async def pause() -> None:
                async with agent.paused(mode="wait", wait_s=0.05, escalate="abort"):
                    assert engine.paused_by == ["wait"]

            paused = asyncio.create_task(pause())
            await engine.broke.wait()
            engine.drained.set()
            await paused

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_version_outlives_broker_and_engine() -> None:
    """The trainer alone remembers it; the new broker's next one is greater."""

    async def scenario() -> None:
        weights = {"w": torch.zeros(4)}
        async with contextlib.AsyncExitStack() as trainers:
            async with a_broker() as (_, address):
                trainer = TrainerAgent(address, name="trainer", timeout_s=TIMEOUT_S)
                async with Sidecar(StubEngine(), broker=address, name="old"):
                    await trainers.enter_async_context(trainer)
                    await trainer.wait_for_engines(1)
                    assert [await trainer.update_weights(weights) for _ in range(3)] == [1, 2, 3]
            async with a_broker(address), Sidecar(StubEngine(), broker=address, name="new"):
                await trainer.wait_for_engines(1)
                assert await trainer.update_weights(weights) > 3
                await trainer.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


class Sleeper(StubEngine):
    """Refuses the first ``refusals`` of what resumes it; its pauses return when they are let go."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.asleep = False
        self.pausing = asyncio.Event()
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.running = asyncio.Event()

    async def start(self) -> EngineInfo:
        return EngineInfo("stub", "test", "none", 0, 1, 1, ("shm",), "", can_sleep=True)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        self.running.clear()
        self.pausing.set()
        await self.let_go.wait()
        return 0

    async def sleep(self, level: SleepLevel) -> None:  # noqa: ARG002
        self.asleep = True

    async def wake(self) -> None:
        await self.resume()
        self.asleep = False

    async def resume(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise EngineError("no room for the KV cache yet")
        self.running.set()


@contextlib.asynccontextmanager
async def two_sleepers(one: Sleeper, other: Sleeper | None = None) -> AsyncIterator[TrainerAgent]:
    async with contextlib.AsyncExitStack() as stack:
        _, address = await stack.enter_async_context(a_broker())
        engines = [one] if other is None else [one, other]
        for engine, name in zip(engines, ("one", "other"), strict=False):
            await stack.enter_async_context(Sidecar(engine, broker=address, name=name))
        agent = await stack.enter_async_context(TrainerAgent(address, name="trainer"))
        await agent.wait_for_engines(len(engines))
        yield agent


def test_one_that_can_not_resume_is_named_and_asked_again() -> None:
    """The update is committed, the other serves it; the report says who is still paused."""

    async def scenario() -> None:
        one, other = Sleeper(refusals=1), Sleeper()
        async with two_sleepers(one, other) as agent:
            assert await agent.update_weights({"w": torch.zeros(4)}) == 1
            assert agent.last_update is not None
            assert agent.last_update.excluded == ("one",)
            assert other.running.is_set()
            await one.running.wait()
            assert await agent.update_weights({"w": torch.ones(4)}) == 2
            assert agent.last_update.excluded == ()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_the_only_one_that_can_not_wake_says_why() -> None:
    """At the end of the block; and it wakes as soon as it can."""

    async def scenario() -> None:
        engine = Sleeper(refusals=1)
        async with two_sleepers(engine) as agent:
            with pytest.raises(Refused, match="no room for the KV cache yet") as refused:
                async with agent.asleep():
                    assert engine.asleep
            assert refused.value.code is NackCode.ENGINE_FAILED
            await engine.running.wait()
            assert not engine.asleep

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_pause_that_is_cancelled_is_completed_and_resumed() -> None:
    """Whoever cancels it gets its task back when the engines generate again."""

    async def scenario() -> None:
        engine = Sleeper()
        engine.let_go.clear()
        async with two_sleepers(engine) as agent:
            pausing = asyncio.create_task(agent.paused().__aenter__())
            await engine.pausing.wait()
            pausing.cancel()
            engine.let_go.set()
            with pytest.raises(asyncio.CancelledError):
                await pausing
            assert engine.running.is_set()
            async with agent.paused():
                assert not engine.running.is_set()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


class Held(ByStep, Sleeper):
    """The call named ``held`` returns when it is let go."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.calls: list[str] = []
        self._held = held

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._held:
            self.reached.set()
            await self.go_on.wait()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:
        await super().pause(mode, clear_cache=clear_cache)
        await self._call("pause")
        return 0

    async def on_start(self, start: Start) -> None:
        await self._call("recover" if start.recover else "start")

    async def on_load(self, _chunk: LoadChunk) -> None:
        await self._call("load")

    async def on_restore(self, _restore: Restore) -> None:
        await self._call("restore")

    async def on_finish(self, _finish: Finish) -> None:
        await self._call("finish")

    async def commit(self, version: int) -> None:  # noqa: ARG002
        await self._call("commit")


@pytest.mark.parametrize("held", ["pause", "start", "load", "finish", "commit"])
def test_an_update_that_is_cancelled_is_undone_first(held: str) -> None:
    """Then the engines go on, unless they hold a part of it: the next one mends those. What was to
    follow the step that is under way, was asked already, and is not made."""

    async def scenario() -> None:
        engine = Held(held)
        async with two_sleepers(engine) as agent:
            weights = {"w": torch.zeros(4)}
            updating = asyncio.create_task(agent.update_weights(weights))
            await engine.reached.wait()
            updating.cancel()
            given_up = {"pause": "idle", "commit": "committing"}.get(held, "aborting")
            while (await agent.status()).groups[0].update != given_up:
                pass
            engine.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await updating
            assert engine.running.is_set() == (held not in ("load", "finish"))
            undone = {"pause": [], "start": ["restore"], "commit": []}.get(held, [])
            order = ["pause", "start", "load", "finish", "commit"]
            assert engine.calls == [*order[: order.index(held) + 1], *undone]
            assert await agent.update_weights(weights) == 2
            assert engine.running.is_set()
            again = "recover" if held in ("load", "finish") else "start"
            assert engine.calls[-4:] == [again, "load", "finish", "commit"]

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


class Finishing(ByStep, StubEngine):
    """Fails to finish, as often as it is told."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.open = True

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - the engine's
        self.open = open

    async def on_finish(self, _finish: Finish) -> None:
        if self.failures:
            self.failures -= 1
            raise EngineError("it can't")


def test_without_the_quorum_nobody_serves_the_update() -> None:
    """All were loaded, and none is committed: they are mended by the next one."""

    async def scenario() -> None:
        engines = [Finishing(0), Finishing(1)]
        async with contextlib.AsyncExitStack() as stack:
            _, address = await stack.enter_async_context(a_broker())
            for number, engine in enumerate(engines):
                sidecar = Sidecar(engine, broker=address, name=f"e{number}")
                await stack.enter_async_context(sidecar)
            agent = await stack.enter_async_context(TrainerAgent(address, name="trainer"))
            await agent.wait_for_engines(2)
            weights = {"w": torch.zeros(4)}
            with pytest.raises(UpdateFailed, match="1 of 2 DP groups are left: it can't") as failed:
                await agent.update_weights(weights, quorum="all")
            assert (failed.value.code, failed.value.nack.peer) == (NackCode.QUORUM_MISSING, "e1")
            assert [engine.open for engine in engines] == [False, False]
            with pytest.raises(Refused) as refused:
                await agent.update_weights(weights, quorum=3)
            assert refused.value.code is NackCode.QUORUM_MISSING
            assert await agent.update_weights(weights, quorum=2) == 2
            assert [engine.open for engine in engines] == [True, True]
            with pytest.raises(UsageError, match="quorum=0"):
                await agent.update_weights(weights, quorum=0)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.parametrize("quorum", [None, 1])
def test_a_prefill_and_a_decode_engine_are_updated_together_or_not_at_all(
    quorum: int | None,
) -> None:
    """Whoever asks for less gets it; a third engine alone would be enough without a pair."""

    async def scenario() -> None:
        engines = [Finishing(0), Finishing(1)]
        async with contextlib.AsyncExitStack() as stack:
            _, address = await stack.enter_async_context(a_broker())
            for role, engine in zip(ROLES, engines, strict=True):
                sidecar = Sidecar(engine, broker=address, name=role, pd_role=role)
                await stack.enter_async_context(sidecar)
            agent = await stack.enter_async_context(TrainerAgent(address, name="trainer"))
            await agent.wait_for_engines(2)
            weights = {"w": torch.zeros(4)}
            if quorum is None:
                with pytest.raises(UpdateFailed, match="1 of 2 DP groups are left") as failed:
                    await agent.update_weights(weights)
                assert failed.value.code is NackCode.QUORUM_MISSING
            else:
                assert await agent.update_weights(weights, quorum=quorum) == 1
                assert agent.last_update is not None
                assert agent.last_update.excluded == ("decode",)
            assert await agent.update_weights(weights) == 2
            [group] = (await agent.status()).groups
            roles = {engine.name: engine.pd_role for engine in group.engines}
            assert roles == {role: role for role in ROLES}
            assert {route.engine: route.pd_role for route in group.routes.engines} == roles

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_sidecar_that_is_closed_leaves_what_sleeps_to_its_trainer() -> None:
    """The trainer uses that memory until its block ends; the pause lease wakes the engine."""

    async def scenario() -> None:
        engine = Sleeper()
        async with a_broker() as (_, address):
            sidecar = Sidecar(engine, broker=address, name="engine")
            await sidecar.start()
            async with TrainerAgent(address, name="trainer") as agent:
                await agent.wait_for_engines(1)
                asleep = agent.asleep()  # kept: what nobody refers to would end
                await asleep.__aenter__()
                assert engine.asleep
                await sidecar.close()
                assert engine.asleep

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
