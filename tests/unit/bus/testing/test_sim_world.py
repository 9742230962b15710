"""The fakes keep their word: time goes forward, and the bad network is repeatable."""

from __future__ import annotations

from functools import partial

import pytest

from bus.protocol.engine.calls import CallCommit, CallLoad, CallPause, CallResume, CallStart
from bus.runtime.memory_transport import Faults, MemoryNetwork
from bus.testing.clock import SimScheduler
from bus.testing.ground_truth import GroundTruth, InvariantViolation
from bus.testing.process import Process


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


def carried(faults: Faults, seed: int = 1) -> tuple[list[bytes], dict[str, int]]:
    """What arrives of a hundred frames."""
    clock = SimScheduler()
    network = MemoryNetwork(clock, seed=seed, faults=faults)
    arrived: list[bytes] = []
    network.server().listen(lambda _route, frame, _user: arrived.append(frame))
    client = network.client(b"e0")
    for count in range(100):
        client.send(bytes([count]))
    clock.run_for(10_000.0)
    return arrived, network.counts


def test_an_honest_network_delivers_everything_in_order() -> None:
    """Also when frames take their time."""
    arrived, counts = carried(Faults(delay_ms=5.0, jitter_ms=50.0))
    assert arrived == [bytes([count]) for count in range(100)]
    assert counts["delivered"] == 100


def test_a_bad_network_drops_doubles_and_disorders() -> None:
    """And counts it."""
    arrived, counts = carried(Faults(drop=0.2, duplicate=0.2, jitter_ms=50.0, reorder=True))
    assert counts["dropped"] > 5
    assert counts["duplicated"] > 5
    assert arrived != sorted(arrived)
    assert len(arrived) == 100 - counts["dropped"] + counts["duplicated"]


def test_one_seed_is_one_course_of_events() -> None:
    """And another seed another one."""
    faults = Faults(drop=0.2, duplicate=0.2, jitter_ms=50.0, reorder=True)
    assert carried(faults) == carried(faults)
    assert carried(faults) != carried(faults, seed=2)


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([CallResume()], "without a completed pause"),
        ([CallPause("keep", True), CallPause("keep", True)], "paused twice"),
        ([CallPause("keep", True), CallResume(), CallResume()], "without a completed pause"),
        ([CallStart(recover=False, target="model")], "while it may generate"),
        ([CallPause("keep", True), CallStart(recover=True, target="model")], r"broken is set\(\)"),
        (
            [
                CallPause("keep", True),
                CallStart(recover=False, target="model"),
                CallLoad(0, "off", ()),
            ],
            "chunk 0 is loaded",
        ),
        ([CallPause("keep", True), CallCommit(1)], "before it was finished"),
    ],
)
def test_the_truth_does_not_let_itself_be_bent(
    calls: list[CallPause | CallResume | CallStart | CallLoad | CallCommit], told: str
) -> None:
    """An engine that is made to do what must never be done says so at once."""
    truth = GroundTruth("e0", ("a", "b"))
    for call in calls[:-1]:
        truth.begin(call)
        truth.end(call)
    with pytest.raises(InvariantViolation, match=told):
        truth.begin(calls[-1])


def test_a_link_can_be_cut_in_one_direction() -> None:
    """Until it is healed; what was on its way then is lost, too."""
    clock = SimScheduler()
    network = MemoryNetwork(clock, faults=Faults(delay_ms=1.0))
    seen: list[bytes] = []
    server, client = network.server(), network.client(b"e0")
    server.listen(lambda _route, frame, _user: seen.append(frame))
    client.listen(seen.append)

    def both(frame: bytes) -> None:
        client.send(b"up " + frame)
        server.send([b"e0"], b"down " + frame)
        clock.run_for(5.0)

    network.cut(b"e0", down=False)
    both(b"1")
    network.heal(b"e0")
    network.cut(b"e0", up=False)
    both(b"2")
    network.heal(b"e0")
    both(b"3")
    assert seen == [b"down 1", b"up 2", b"up 3", b"down 3"]


def test_what_comes_to_a_stopped_process_piles_up() -> None:
    """It is done when the process goes on, in its order; what was cancelled meanwhile is not."""
    clock = SimScheduler()
    network = MemoryNetwork(clock)
    process = Process(clock, network)
    seen: list[object] = []
    process.client(b"e0").listen(seen.append)
    process.call_at(3.0, lambda: seen.append("timer"))
    cancelled = process.call_at(4.0, lambda: seen.append("cancelled"))
    process.stop()
    network.server().send([b"e0"], b"frame")
    clock.run_for(10.0)
    assert seen == []
    cancelled.cancel()
    process.cont()
    clock.run_for(1.0)
    assert seen == [b"frame", "timer"]
    assert process.continued_ms == process.last_frame_ms == 10.0


def test_a_process_dies_between_two_of_its_sends() -> None:
    """Of three frames in a row the first is sent; nothing comes to it, or from it, any more."""
    clock = SimScheduler()
    network = MemoryNetwork(clock)
    process = Process(clock, network)
    arrived: list[bytes] = []
    network.server().listen(lambda _route, frame, _user: arrived.append(frame))
    client = process.client(b"e0")
    process.die_after(1, process.kill)

    def three() -> None:
        for frame in (b"1", b"2", b"3"):
            client.send(frame)

    process.call_at(1.0, three)
    process.call_at(2.0, three)
    clock.run_for(10.0)
    assert arrived == [b"1"]
    assert not process.alive
