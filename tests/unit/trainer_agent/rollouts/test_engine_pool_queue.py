"""Requests that wait for engines: who is woken, and how much work that is."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bus.messages import RequestLimits, Route
from trainer_agent._rollouts.engine_pool import EngineQueue

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

NOBODY: frozenset[str] = frozenset()
ENGINES = 4
SLOTS = 8


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120.0))


def queue_of(*slots: int) -> EngineQueue:
    queue = EngineQueue()
    queue.router.update(
        Route(f"e{index}", "", f"http://e{index}", RequestLimits(slots=each))
        for index, each in enumerate(slots)
    )
    return queue


def calls_per_request(requests: int, clients: int, sessions: int) -> float:
    """How many functions are called for a request, when all wait from the beginning.

    Calls count the wake-ups of tasks, and all that the queue does.
    """
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += 1

    async def ask(queue: EngineQueue, number: int) -> None:
        session = f"s{number % sessions}" if number % 2 else None
        load = await queue.acquire(session, 1, NOBODY, f"c{number % clients}")
        await asyncio.sleep(0)
        queue.router.succeeded(load)
        queue.release(load, 1)

    async def scenario() -> None:
        queue = queue_of(*[SLOTS] * ENGINES)
        for number in range(sessions):  # to place one takes as long as there are engines
            queue.router.place(f"s{number}")
        tasks = [asyncio.create_task(ask(queue, number)) for number in range(requests)]
        sys.setprofile(count)
        try:
            await asyncio.gather(*tasks)
        finally:
            sys.setprofile(None)

    run(scenario())
    return calls / requests


def test_the_work_for_a_request_does_not_grow_with_how_many_wait() -> None:
    few = calls_per_request(400, clients=100, sessions=100)
    many = calls_per_request(40_000, clients=100, sessions=10_000)
    assert many < 1.25 * few


@pytest.mark.parametrize("session", [None, "s"])
def test_only_who_can_run_is_woken_and_clients_take_turns(session: str | None) -> None:
    async def scenario() -> None:
        queue = queue_of(1)
        running = await queue.acquire(session, 1, NOBODY, "first")
        order: list[str] = []

        async def ask(client: str) -> None:
            load = await queue.acquire(session, 1, NOBODY, client)
            order.append(client)
            await release.wait()
            queue.release(load, 1)

        release = asyncio.Event()
        tasks = [asyncio.create_task(ask("many")) for _ in range(50)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask("one")))
        await asyncio.sleep(0)
        queue.release(running, 1)
        await asyncio.sleep(0)
        assert order == ["many"]
        release.set()
        await asyncio.gather(*tasks)
        assert order[:3] == ["many", "one", "many"]

    run(scenario())


def test_who_waits_goes_to_the_least_loaded_of_the_engines_that_come() -> None:
    async def scenario() -> None:
        queue = queue_of()
        asked = [asyncio.create_task(queue.acquire(None, 1, NOBODY)) for _ in range(4)]
        kept = asyncio.create_task(queue.acquire("s", 1, NOBODY))
        await asyncio.sleep(0)
        assert len(queue._waiting) == 5
        queue.router.update(queue_of(4, 4).router.engines[name].route for name in ("e0", "e1"))
        queue._grant(())
        engines = [load.route.engine for load in await asyncio.gather(*asked)]
        assert sorted(engines)[1:3] == ["e0", "e1"]
        assert (await kept).route.engine == queue.router.place("s")

    run(scenario())


def test_a_session_that_waits_moves_with_its_engines_end() -> None:
    async def scenario() -> None:
        queue = queue_of(1, 1)
        engine = (await queue.acquire("s", 1, NOBODY)).route.engine
        waits = asyncio.create_task(queue.acquire("s", 1, NOBODY))
        await asyncio.sleep(0)
        left = [load.route for name, load in queue.router.engines.items() if name != engine]
        queue.router.update(left)
        queue._grant(())
        assert (await waits).route == left[0]

    run(scenario())


def test_a_held_engine_is_offered_again() -> None:
    async def scenario() -> None:
        queue = queue_of(1)
        load = await queue.acquire(None, 1, NOBODY)
        waits = asyncio.create_task(queue.acquire(None, 1, NOBODY))
        await asyncio.sleep(0)
        queue.router.rejected(load, queue.now_s())
        queue.release(load, 1)
        assert not waits.done()
        assert await waits is load

    run(scenario())


def test_who_is_cancelled_leaves_its_place_to_the_next() -> None:
    """Also if it had been granted an engine, and also if it was too large for what is free."""

    async def scenario() -> None:
        queue = queue_of(4)
        load = await queue.acquire(None, 1, NOBODY)
        large = asyncio.create_task(queue.acquire(None, 4, NOBODY))
        await asyncio.sleep(0)
        small = asyncio.create_task(queue.acquire(None, 1, NOBODY, "another"))
        await asyncio.sleep(0)
        large.cancel()
        assert await small is load
        granted = asyncio.create_task(queue.acquire(None, 4, NOBODY))
        await asyncio.sleep(0)
        queue.release(load, 1)
        queue.release(load, 1)
        granted.cancel()
        await asyncio.wait([granted])
        assert (load.in_flight, len(queue._waiting)) == (0, 0)

    run(scenario())


def test_who_waits_for_a_prefill_engine_learns_that_none_is_left() -> None:
    async def scenario() -> None:
        queue = queue_of()
        roles: list[Any] = ["prefill", "decode"]
        routes = [
            Route(role, "", f"http://{role}", RequestLimits(slots=1), pd_role=role)
            for role in roles
        ]
        queue.router.update(routes)
        assert await queue.acquire_prefill(frozenset({"prefill"})) is None
        load = await queue.acquire_prefill(NOBODY)
        assert load is not None
        waits = [asyncio.create_task(queue.acquire_prefill(NOBODY)) for _ in range(2)]
        await asyncio.sleep(0)
        queue.release(load, 1)
        assert await waits[0] is load
        queue.router.update(routes[1:])
        queue._grant(())
        assert await waits[1] is None

    run(scenario())
