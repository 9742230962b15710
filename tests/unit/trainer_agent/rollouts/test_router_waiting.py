"""Requests that wait: clients take turns, and no work grows with how many wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trainer_agent._rollouts.router import Waiter, WaitingRequests

if TYPE_CHECKING:
    from collections.abc import Coroutine

NOBODY: frozenset[str] = frozenset()
ANY = ("", NOBODY)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


def waiter(client: str, since_s: float = 0.0) -> Waiter:
    return Waiter(client, None, 1, NOBODY, since_s, asyncio.get_running_loop().create_future())


def served(waiting: WaitingRequests, engine: str) -> list[str]:
    """The clients, in the order in which an engine serves their requests."""
    clients = []
    while (first := waiting.first(engine)) is not None:
        first.granted.set_result(None)
        waiting.remove(first)
        clients.append(first.client)
    return clients


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    async def scenario() -> None:
        waiting = WaitingRequests()
        own = [waiter("a") for _ in range(4)]
        for each in (*own, waiter("b"), waiter("b"), waiter("c")):
            waiting.add(each, ANY, ("e0",))
        first = waiting.first("e0")
        assert first is own[0]
        assert served(waiting, "e0") == ["a", "b", "c", "a", "b", "a", "a"]
        assert not waiting

    run(scenario())


def test_an_engines_sessions_and_the_others_take_turns_as_well() -> None:
    """A client with requests of both kinds is behind the others after each of them."""

    async def scenario() -> None:
        waiting = WaitingRequests()
        for client in ("a", "a", "b"):
            waiting.add(waiter(client), ("e0", NOBODY), ("e0",))
        for client in ("c", "c"):
            waiting.add(waiter(client), ANY, ("e0", "e1"))
        waiting.add(waiter("d"), ("", frozenset({"e0"})), ("e1",))
        assert served(waiting, "e1") == ["c", "d", "c"]
        assert served(waiting, "e0") == ["a", "b", "a"]

    run(scenario())


def test_who_leaves_takes_no_turn() -> None:
    async def scenario() -> None:
        waiting = WaitingRequests()
        gone, cancelled = waiter("a"), waiter("a")
        for each in (gone, cancelled, waiter("a"), waiter("b")):
            waiting.add(each, ANY, ("e0",))
        waiting.remove(gone)
        waiting.remove(gone)
        cancelled.granted.cancel()
        assert served(waiting, "e0") == ["a", "b"]

    run(scenario())


def test_routes_move_the_sessions_of_an_engine_that_left_and_no_others() -> None:
    async def scenario() -> None:
        waiting = WaitingRequests()
        for engine, client in (("e0", "a"), ("e1", "b")):
            waiting.add(waiter(client), (engine, NOBODY), (engine,))
        waiting.add(waiter("c"), ANY, ("e0", "e1"))
        waiting.add(waiter("d"), ("", frozenset({"e1"})), ("e0",))

        def place(each: Waiter) -> tuple[tuple[str, frozenset[str]], tuple[str, ...]]:
            if each.client == "d":
                return ("", frozenset({"e1"})), ()
            return (ANY, ("e1",)) if each.client == "c" else (("e1", NOBODY), ("e1",))

        lost = waiting.reroute(place, {"e1"})
        assert [each.client for each in lost] == ["d"]
        assert waiting.first("e0") is None
        assert served(waiting, "e1") == ["b", "c", "a"]

    run(scenario())


def test_the_oldest_are_found_first() -> None:
    async def scenario() -> None:
        waiting = WaitingRequests()
        for since_s in (1.0, 2.0, 3.0):
            waiting.add(waiter("a", since_s), ANY, ("e0",))
        assert waiting.oldest_s == 1.0
        assert [each.since_s for each in waiting.pop_since(2.0)] == [1.0, 2.0]
        assert waiting.oldest_s == 3.0

    run(scenario())
