"""The end of a trainer agent."""

from __future__ import annotations

import asyncio

import anyio

from tests.unit.trainer_agent.test_connection import StubBroker
from trainer_agent.agent import TrainerAgent


def test_who_is_cancelled_while_he_leaves_has_left() -> None:
    """A cancelled scope cancels each wait in it; else the broker would hear the agent for ever."""

    async def scenario() -> None:
        broker = StubBroker()
        agent = TrainerAgent("tcp://127.0.0.1:1", keep_last=True, transport=broker)
        let_go = asyncio.Event()
        with anyio.CancelScope() as scope:
            async with agent:
                assert agent._catch_up is not None
                agent._catch_up._task = asyncio.create_task(undone(let_go))
                await asyncio.sleep(0)
                scope.cancel()
        assert scope.cancelled_caught
        assert broker.kinds[-1] == "LEAVE"
        let_go.set()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


async def undone(let_go: asyncio.Event) -> None:
    """A catch-up that takes a while to undo."""
    try:
        await asyncio.Future()
    finally:
        await let_go.wait()
