"""Placement: sessions stay, windows hold, and an engine that leaves moves its own sessions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bus.messages import EngineView, RequestLimits, Route
from trainer_agent._rollouts.router import EngineLoad, Router

if TYPE_CHECKING:
    from collections.abc import Collection

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
    name = router.place(session)
    assert name is not None
    return name


def take(router: Router, name: str, sequences: int = 1) -> EngineLoad:
    """Sends a request to the engine, where it stays in flight."""
    load = router.engines[name]
    assert load.has_room(sequences, 0.0)
    load.take(sequences)
    return load


def picked(
    router: Router,
    session: str | None = None,
    sequences: int = 1,
    now_s: float = 0.0,
    avoid: Collection[str] = (),
) -> str | None:
    """The name of the engine that takes a request as the queue does; it stays in flight."""
    able = router.able(avoid)
    names = able if session is None else {router.place(session, avoid)}
    free = [e for n, e in able.items() if n in names and e.has_room(sequences, now_s)]
    if not free:
        return None
    load = min(free, key=lambda e: (e.fill, e.route.engine))
    load.take(sequences)
    return load.route.engine


def test_requests_go_to_the_least_loaded_engine_until_its_slots_are_full() -> None:
    router = router_of("a", "b", slots=2)
    assert Counter(picked(router) for _ in range(5)) == {"a": 2, "b": 2, None: 1}
    router.release(router.engines["b"], 1)
    assert picked(router) == "b"


def test_a_request_without_tokens_goes_to_the_least_loaded_engine_that_takes_any() -> None:
    router = router_of("a", "b", slots=2)
    take(router, "a")
    assert router.least_loaded(0.0) is router.engines["b"]
    assert router.least_loaded(0.0, ("b",)) is router.engines["a"]
    router.rejected(router.engines["b"], 0.0)
    assert router.least_loaded(0.0) is router.engines["a"]
    router.rejected(router.engines["a"], 0.0)
    assert router.least_loaded(0.0) is None


def test_a_request_larger_than_a_window_goes_alone() -> None:
    router = router_of("a", slots=2)
    assert picked(router, sequences=5) == "a"
    assert picked(router) is None


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
    engine = picked(router, "s")
    assert picked(router, "s") is None
    assert picked(router) not in (None, engine)


def test_rejections_shrink_a_window_once_for_all_under_way_and_completions_grow_it() -> None:
    router = router_of("a", slots=8)
    load = router.engines["a"]
    for _ in range(5):
        router.rejected(load, 1.0)
    assert load.window == 4
    assert picked(router, now_s=1.0) is None
    assert picked(router, now_s=load.held_until_s) == "a"
    for _ in range(100):
        router.succeeded(load)
    assert load.window == 8


def test_a_window_is_back_after_as_many_completions_as_it_had_slots() -> None:
    """However often it was halved while the engine was closed; beyond it grows slowly."""
    router = router_of("a", slots=256)
    load = router.engines["a"]
    load.window = 128.0
    for now_s in (0.0, 1.0, 3.0, 6.0, 9.0):
        router.rejected(load, now_s)
    assert load.window == 4
    for _ in range(128):
        router.succeeded(load)
    assert 128 <= load.window < 129
    for _ in range(128):
        router.succeeded(load)
    assert 128 < load.window < 130


def test_a_window_in_which_requests_waited_is_not_soon_as_large_again() -> None:
    """Or the engine would run out of memory again."""
    router = router_of("a", slots=128)
    load = router.engines["a"]
    for _ in range(2):
        router.take_figures([figures("a", in_flight=128, waiting=30)])
    assert load.window == 64
    for _ in range(64):
        router.succeeded(load)
    assert 96 <= load.window < 97
    router.rejected(load, 0.0)
    for _ in range(64):
        router.succeeded(load)
    assert 96 <= load.window < 98


def figures(name: str, in_flight: int, waiting: int = 0) -> EngineView:
    """What the broker has heard of an engine."""
    return EngineView(
        name=name,
        dp_group=name,
        endpoint=f"http://{name}",
        kind="",
        software="",
        draft=False,
        phase="running",
        in_flight=in_flight,
        host="",
        last_heard_ms=0.0,
        backends=(),
        core_phase="",
        core_since_ms=0.0,
        waiting=waiting,
        model="",
        dp_rank=0,
        dp_size=1,
        workers=1,
        version=0,
        pid=0,
        core_step=0,
        core_wave=0,
    )


def test_what_other_clients_have_on_an_engine_counts() -> None:
    """Until it is not known any more."""
    router = router_of("a", "b", slots=8)
    router.take_figures([figures("a", in_flight=3), figures("b", in_flight=0)])
    assert Counter(picked(router) for _ in range(5)) == {"a": 1, "b": 4}
    router.take_figures([])
    assert picked(router) == "a"


def test_own_requests_are_not_taken_for_those_of_others() -> None:
    """An engine's count may be of a moment when they were in flight."""
    router = router_of("a", slots=8)
    load = take(router, "a", 4)
    router.release(load, 4)
    for _ in range(4):
        router.take_figures([figures("a", in_flight=5)])
        assert load.others == 1
    router.take_figures([figures("a", in_flight=5)])
    assert load.others == 5


def test_requests_that_wait_in_an_engine_shrink_its_window() -> None:
    """Once may be chance: a request that has just come waits for the next step."""
    router = router_of("a", slots=8)
    load = router.engines["a"]
    for waiting, window in ((1, 8), (0, 8), (2, 8), (1, 4), (1, 2), (0, 2)):
        router.take_figures([figures("a", in_flight=9, waiting=waiting)])
        assert load.window == window
    router.succeeded(load)
    assert load.window > 2


def test_requests_that_come_do_not_shrink_it() -> None:
    """Those of a burst wait for the next step, and others come meanwhile."""
    router = router_of("a", slots=8)
    for in_flight, window in ((2, 8), (5, 8), (8, 8), (8, 4)):
        router.take_figures([figures("a", in_flight=in_flight, waiting=1)])
        assert router.engines["a"].window == window


def test_an_engine_that_returns_is_asked_at_once_and_keeps_count_of_what_is_in_flight() -> None:
    router = router_of("a", slots=1)
    load = take(router, "a")
    router.rejected(load, 0.0)
    router.update([])
    assert picked(router) is None
    router.update(routes("a", slots=1))
    assert picked(router) is None  # its one slot is taken
    router.release(load, 1)
    assert picked(router) == "a"


def test_requests_of_a_dead_engine_do_not_count_for_the_one_in_its_place() -> None:
    """It has the same name, and another port."""
    router = router_of("a", slots=1)
    old = take(router, "a")
    anew = [replace(route, endpoint="http://a:2") for route in routes("a", slots=1)]
    router.update(anew)
    assert picked(router) == "a"
    router.release(old, 1)
    assert picked(router) is None  # its one slot is taken


def test_what_failed_a_request_is_avoided_unless_nothing_else_is_there() -> None:
    router = router_of("a", "b")
    assert picked(router, avoid={"a"}) == "b"
    assert picked(router, avoid={"a", "b"}) is not None


def test_the_strictest_limits_hold_for_all() -> None:
    router = Router()
    router.update(
        [
            Route("a", "a", "http://a", RequestLimits(100, 64, 0, exact_seeds=True)),
            Route("b", "b", "http://b", RequestLimits(0, 32, 8)),
        ]
    )
    assert router.limits == RequestLimits(100, 32, 8)


def test_limits_and_samplers_follow_an_update() -> None:
    """They are computed once per ROUTES, and not for each request."""
    router = router_of("a", slots=4)
    assert router.limits == RequestLimits(100, 64, 4)
    (route,) = routes("b", slots=2)
    router.update([replace(route, limits=RequestLimits(50, 32, 2))])
    assert router.limits == RequestLimits(50, 32, 2)
    assert set(router.samplers) == {"b"}
    router.update([])
    assert router.limits.slots == 0
    assert router.samplers == {}


def test_engines_without_an_endpoint_are_left_out() -> None:
    router = Router()
    router.update([Route("a", "a", "")])
    assert picked(router) is None


def test_sessions_stay_on_decode_engines_and_prompts_go_to_the_least_loaded_prefill_engine() -> (
    None
):
    """Prefill engines sample only while no other engine is there."""
    router = Router()
    prefills = [replace(route, pd_role="prefill") for route in routes("p", "q", slots=2)]
    decodes = [replace(route, pd_role="decode") for route in routes("a", "b", slots=2)]
    router.update([*prefills, *decodes])
    assert router.is_split
    assert {place(router, f"s{index}") for index in range(20)} == {"a", "b"}
    assert Counter(picked(router) for _ in range(5)) == {"a": 2, "b": 2, None: 1}
    assert router.prefills().keys() == {"p", "q"}
    assert router.prefills({"p", "q"}) == {}
    router.update(prefills)
    assert not router.is_split
    assert router.place("s0") in ("p", "q")
    router.update([*prefills, *routes("c")])
    assert (router.place("s0"), router.is_split) == ("c", False)
