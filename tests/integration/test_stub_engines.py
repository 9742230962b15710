"""A whole bus around engines that do no work: adapters that break, a broker that is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import Refused
from bus.messages import NackCode
from sidecar import Sidecar
from sidecar.bench.agents import StubEngine
from tests.support.broker import a_broker
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.messages import PauseMode

TIMEOUT_S = 30.0


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

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:  # noqa: ARG002
        self._break(mode)
        if mode == "wait":
            await self.drained.wait()
        self.paused_by.append(mode)


@contextlib.asynccontextmanager
async def a_bus(engine: Broken) -> AsyncIterator[TrainerAgent]:
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
