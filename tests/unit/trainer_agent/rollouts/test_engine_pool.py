"""Requests that wait for engines, and attempts that may have stalled, without a bus."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from bus.errors import NoEngine
from bus.messages import RequestLimits, Route, Routes
from tests.unit.trainer_agent.rollouts.test_router import figures
from trainer_agent._rollouts.engine_pool import AttemptWatch, EnginePool

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


def test_who_waits_for_an_engine_in_vain_is_told_and_the_broker_is_asked_once() -> None:
    asked: list[int] = []

    async def engines() -> tuple[Any, ...]:
        asked.append(1)
        await asyncio.sleep(0)
        return (SimpleNamespace(name="e0", endpoint="http://e0", phase="running"),)

    async def scenario() -> None:
        bus: Any = SimpleNamespace(engines=engines)
        pool = EnginePool("policy", bus, stall_s=60, unavailable_s=1)
        pool.router.update([Route("e0", "", "http://e0", RequestLimits(slots=1))])
        load = await pool.acquire(None, 1, NOBODY)
        asks = [asyncio.create_task(pool.acquire(None, 1, NOBODY)) for _ in range(9)]
        await asyncio.sleep(0)
        await pool._fail_waiting()
        assert not any(task.done() for task in asks)
        for waiter in pool._waiting._arrivals:
            waiter.since_s -= 2.0
        await pool._fail_waiting()
        for found in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(found, NoEngine)
            assert "e0 at http://e0" in str(found)
        assert len(asked) == 1
        pool.release(load, 1)
        assert not pool._waiting

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


class Looks:
    """A pool whose engine e0 has an attempt since 0 s; its time is given."""

    def __init__(self) -> None:
        bus: Any = SimpleNamespace()
        self.pool = EnginePool("policy", bus, stall_s=10.0, unavailable_s=60.0)
        self.now_s = 0.0
        self.expired: list[Any] = []
        self.pool.now_s = lambda: self.now_s  # type: ignore[method-assign]
        self.pool.router.update([Route("e0", "", "http://e0", RequestLimits(slots=4))])
        self.attempt = self.begin(0.0)

    def begin(self, begun_s: float, **how: Any) -> AttemptWatch:
        load = self.pool.router.engines["e0"]
        limit: Any = object()
        attempt = AttemptWatch(load, limit, begun_s, begun_s, **how)
        self.pool.attempts.add(attempt)
        return attempt

    def token(self, attempt: AttemptWatch, now_s: float) -> None:
        self.now_s = now_s
        self.pool.on_token(attempt)

    def look(self, now_s: float, *, step: int = 0, waiting: int | None = None) -> bool:
        """Whether the attempt is cancelled. ``waiting=None``: the broker reports no figures."""
        self.now_s = now_s
        seen = figures("e0", in_flight=16, waiting=waiting or 0)
        seen = replace(seen, core_phase="step", core_step=step)
        self.pool._look((seen,) if waiting is not None else (), now_s)
        return self.attempt.limit in self.expired


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    found = Looks()
    monkeypatch.setattr("trainer_agent._rollouts.engine_pool.expire", found.expired.append)
    return found


def test_an_attempt_in_the_queue_of_an_engine_that_steps_has_not_stalled(looks: Looks) -> None:
    """It has ``stall_s`` for a token once nothing waits there any more, and no more."""
    assert not any(looks.look(float(now_s), step=now_s, waiting=12) for now_s in range(100))
    assert not looks.look(109.0, step=109, waiting=0)
    assert looks.look(110.0, step=110, waiting=0)


def test_an_attempt_in_the_queue_of_an_engine_that_stands_has_stalled(looks: Looks) -> None:
    assert not looks.look(5.0, step=7, waiting=12)
    assert not looks.look(14.0, step=7, waiting=12)
    assert looks.look(16.0, step=7, waiting=12)


def test_an_attempt_that_an_engine_has_lost_has_stalled(looks: Looks) -> None:
    """The engine steps for others, and none of its requests waits."""
    assert not looks.look(9.0, step=9, waiting=0)
    assert looks.look(11.0, step=11, waiting=0)


def test_an_attempt_that_later_ones_have_overtaken_has_stalled(looks: Looks) -> None:
    """Requests that wait are served in order, unless they have priorities."""
    later = looks.begin(1.0)
    assert not looks.look(2.0, step=2, waiting=12)
    looks.token(later, 3.0)
    assert not looks.look(4.0, step=4, waiting=12)
    assert looks.look(13.0, step=13, waiting=12)


@pytest.mark.parametrize("whose", ["own", "other's"])
def test_an_attempt_that_waits_behind_priorities_has_not_stalled(looks: Looks, whose: str) -> None:
    looks.attempt.in_order = whose == "other's"
    later = looks.begin(1.0, in_order=whose == "own")
    assert not looks.look(2.0, step=2, waiting=12)
    looks.token(later, 3.0)
    assert not any(looks.look(float(now_s), step=now_s, waiting=12) for now_s in range(4, 100))


def test_an_attempt_that_was_preempted_waits_in_the_queue(looks: Looks) -> None:
    """Those that ran beside it go on, and no later ones begin before it."""
    beside = looks.begin(1.0)
    looks.token(beside, 2.0)
    looks.token(looks.attempt, 2.5)
    for now_s in range(3, 100):
        looks.token(beside, now_s)
        assert not looks.look(now_s + 0.5, step=now_s, waiting=1)


def test_tokens_of_other_attempts_count_where_nothing_else_is_known(looks: Looks) -> None:
    """Such as while the broker is gone. The queue is full of earlier requests."""
    earlier = looks.begin(-1.0)
    for now_s in range(100):
        looks.token(earlier, now_s)
        assert not looks.look(now_s + 0.5)
    assert looks.look(110.0)
