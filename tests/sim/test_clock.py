"""Simulated time goes forward, and runs timers in their order."""

from __future__ import annotations

from functools import partial

from tests.sim.clock import SimScheduler


def test_timers_run_in_order_and_ties_as_they_were_set() -> None:
    """The clock stands at each timer's time while it runs."""
    clock = SimScheduler()
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.now_ms()))

    for name, when_ms in (("b", 5.0), ("c", 5.0), ("a", 2.0)):
        clock.call_at(when_ms, partial(note, name))
    clock.run_for(10.0)
    assert seen == [("a", 2.0), ("b", 5.0), ("c", 5.0)]
    assert clock.now_ms() == 10.0


def test_the_clock_never_goes_back_over_a_cancelled_timer() -> None:
    """Running for so long runs nothing that is due later."""
    clock = SimScheduler()
    seen: list[float] = []
    clock.call_at(5.0, lambda: seen.append(5.0)).cancel()
    clock.call_at(100.0, lambda: seen.append(100.0))
    clock.run_for(10.0)
    assert (seen, clock.now_ms()) == ([], 10.0)
    assert not clock.run_until(lambda: bool(seen), within_ms=10.0)
    assert clock.now_ms() == 20.0
    assert clock.run_until(lambda: bool(seen), within_ms=100.0)
    assert clock.now_ms() == 100.0
