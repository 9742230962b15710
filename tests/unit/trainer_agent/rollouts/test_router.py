"""Placement: sessions stay, windows hold, and an engine that leaves moves its own sessions."""

from __future__ import annotations

from collections import Counter

from bus.messages import RequestLimits, Route
from trainer_agent.rollouts.router import Router

SESSIONS = 400


def router_of(*names: str, slots: int = 4) -> Router:
    router = Router()
    router.update(routes(*names, slots=slots))
    return router


def routes(*names: str, slots: int = 4) -> list[Route]:
    limits = RequestLimits(vocab_size=100, max_model_len=64, slots=slots)
    return [Route(name, name, f"http://{name}", limits) for name in names]


def place(router: Router, session: str) -> str:
    """Where a session's request goes when there is room."""
    engine = router.pick(session, 1, 0.0)
    assert engine is not None
    router.release(engine, 1)
    return engine


def test_requests_go_to_the_least_loaded_engine_until_its_slots_are_full() -> None:
    router = router_of("a", "b", slots=2)
    picked = [router.pick(None, 1, 0.0) for _ in range(5)]
    assert Counter(picked) == {"a": 2, "b": 2, None: 1}
    router.release("b", 1)
    assert router.pick(None, 1, 0.0) == "b"


def test_a_request_larger_than_a_window_goes_alone() -> None:
    router = router_of("a", slots=2)
    assert router.pick(None, 5, 0.0) == "a"
    assert router.pick(None, 1, 0.0) is None


def test_no_engine_has_more_than_its_share_of_sessions() -> None:
    router = router_of("a", "b", "c", "d")
    counts = Counter(place(router, f"s{index}") for index in range(SESSIONS))
    assert len(counts) == 4
    assert max(counts.values()) <= 1.25 * (SESSIONS / 4) + 1


def test_an_engine_that_leaves_moves_its_sessions_and_its_return_moves_none() -> None:
    names = ("a", "b", "c", "d", "e")
    router = router_of(*names)
    before = {f"s{index}": place(router, f"s{index}") for index in range(SESSIONS)}
    router.update(routes(*names[:-1]))
    without = {session: place(router, session) for session in before}
    moved = [session for session in before if before[session] != without[session]]
    assert {before[session] for session in moved} == {"e"}
    assert len(moved) <= SESSIONS * (1 / len(names) + 0.05)
    router.update(routes(*names))
    assert {session: place(router, session) for session in before} == without


def test_a_session_waits_for_its_engine_though_another_is_free() -> None:
    router = router_of("a", "b", slots=1)
    engine = router.pick("s", 1, 0.0)
    assert router.pick("s", 1, 0.0) is None
    assert router.pick(None, 1, 0.0) not in (None, engine)


def test_rejections_shrink_a_window_once_for_all_under_way_and_completions_grow_it() -> None:
    router = router_of("a", slots=8)
    load = router.engines["a"]
    for _ in range(5):
        router.rejected("a", 1.0)
    assert load.window == 4
    assert router.pick(None, 1, 1.0) is None
    held_until_s = router.next_release_s(1.0)
    assert held_until_s is not None
    assert router.pick(None, 1, held_until_s) == "a"
    for _ in range(100):
        router.succeeded("a")
    assert load.window == 8


def test_an_engine_that_returns_is_asked_at_once_and_keeps_count_of_what_is_in_flight() -> None:
    router = router_of("a", slots=1)
    assert router.pick(None, 1, 0.0) == "a"
    router.rejected("a", 0.0)
    router.update([])
    assert router.pick(None, 1, 0.0) is None
    router.update(routes("a", slots=1))
    assert router.pick(None, 1, 0.0) is None  # its one slot is taken
    router.release("a", 1)
    assert router.pick(None, 1, 0.0) == "a"


def test_what_failed_a_request_is_avoided_unless_nothing_else_is_there() -> None:
    router = router_of("a", "b")
    assert router.pick(None, 1, 0.0, avoid={"a"}) == "b"
    assert router.pick(None, 1, 0.0, avoid={"a", "b"}) is not None


def test_the_strictest_limits_hold_for_all() -> None:
    router = Router()
    router.update(
        [
            Route("a", "a", "http://a", RequestLimits(100, 64, 0, exact_seeds=True)),
            Route("b", "b", "http://b", RequestLimits(0, 32, 8)),
        ]
    )
    assert router.limits() == RequestLimits(100, 32, 8)


def test_engines_without_an_endpoint_are_left_out() -> None:
    router = Router()
    router.update([Route("a", "a", "")])
    assert router.pick(None, 1, 0.0) is None
