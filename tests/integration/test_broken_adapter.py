"""An adapter that raises what it may not: the trainer is told, and the bus goes on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from bus.errors import Refused
from bus.messages import NackCode
from bus.protocol.broker import BrokerConfig
from bus.runtime.aio import AsyncioScheduler
from bus.runtime.broker import BrokerServer
from bus.runtime.zmq_transport import ZmqServer
from sidecar import Sidecar
from sidecar.bench.agents import StubEngine
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
    transport = ZmqServer("tcp://127.0.0.1:*")
    server = BrokerServer(transport, AsyncioScheduler(), BrokerConfig())
    server.start()
    try:
        async with (
            Sidecar(engine, broker=transport.address, name="engine"),
            TrainerAgent(transport.address, name="trainer") as agent,
        ):
            await agent.wait_for_engines(1)
            yield agent
    finally:
        server.close()


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
