"""Requests that wait for engines, without a bus."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bus.errors import NoEngine
from bus.messages import RequestLimits, Route, Routes
from trainer_agent.rollouts.engine_pool import EnginePool

SLOTS = 4
NOBODY: frozenset[str] = frozenset()


def test_a_request_of_many_sequences_is_not_overtaken_forever() -> None:
    """It needs all slots; requests of one sequence come behind it, and free one after the other."""

    async def scenario() -> None:
        bus: Any = SimpleNamespace()
        pool = EnginePool("policy", bus, stall_s=60.0, unavailable_s=60.0)
        pool.router.update([Route("e0", "", "http://e0", RequestLimits(slots=SLOTS))])
        under_way = [await pool.acquire(None, 1, NOBODY) for _ in range(SLOTS)]
        large = asyncio.create_task(pool.acquire(None, SLOTS, NOBODY))
        await asyncio.sleep(0)
        small = asyncio.create_task(pool.acquire(None, 1, NOBODY))
        await asyncio.sleep(0)
        for load in under_way:
            pool.release(load, 1)
        load = await large
        assert not small.done()
        pool.release(load, SLOTS)
        pool.release(await small, 1)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_engines_that_serve_no_http_are_no_engines() -> None:
    """Such as an ``AsyncLLM`` in somebody's process: they are routed, without an endpoint."""

    async def engines() -> tuple[Any, ...]:
        return (SimpleNamespace(name="e0", endpoint="", phase="running"),)

    async def scenario() -> None:
        bus: Any = SimpleNamespace(engines=engines)
        pool = EnginePool("policy", bus, stall_s=60.0, unavailable_s=0.05)
        pool._on_routes("policy", Routes(1, (Route("e0", "", ""),)))
        with pytest.raises(NoEngine, match="e0 at no endpoint"):
            await asyncio.wait_for(pool.until_routed(), 30.0)

    asyncio.run(scenario())
