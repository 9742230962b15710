"""Engine calls wait in line, and a round knows whom it waits for."""

from __future__ import annotations

import pytest

from bus._protocol.core.ack_barrier import AckBarrier
from bus._protocol.engine.calls import CallPause, CallQueue, CallResume
from bus.messages import PauseGlobal, Step
from bus.operations import ArmManifest, LoadChunk, Restore
from tests.sim.makers import make_manifest
from tests.unit.bus._builders import ack

PAUSE = CallPause("keep", True)


def test_one_call_runs_and_the_others_wait() -> None:
    """The second is made when the first has ended, and each is made once."""
    queue = CallQueue()
    queue.add(PAUSE, 1)
    queue.add(CallResume(), 2)
    assert queue.issue(5.0) == [PAUSE]
    assert queue.issue(6.0) == []
    assert queue.running() is PAUSE
    job = queue.end(PAUSE)
    assert (job.reply_to, job.since_ms) == (1, 5.0)
    assert queue.issue(7.0) == [CallResume()]


def test_the_end_of_a_call_that_does_not_run_is_a_defect() -> None:
    """The shell reports what it was told to do."""
    queue = CallQueue()
    queue.add(PAUSE, 1)
    queue.issue(0.0)
    with pytest.raises(AssertionError, match="was running"):
        queue.end(CallResume())


def test_what_waits_can_be_dropped_but_for_a_pause() -> None:
    """Chunks of an update that failed make no sense; a pause was acked as issued."""
    queue = CallQueue()
    arm = ArmManifest(make_manifest(), "model")
    queue.add(arm, 1)
    queue.issue(0.0)
    queue.add(LoadChunk(0, "off", ()), 2)
    queue.add(PAUSE, 3)
    queue.add(Restore("model"), 4)
    queue.drop_waiting()
    assert len(queue) == 2
    queue.end(arm)
    assert queue.issue(1.0) == [PAUSE]


def test_an_empty_line_has_nothing_to_issue() -> None:
    """And nothing that runs."""
    queue = CallQueue()
    assert queue.issue(0.0) == []
    assert queue.running() is None


def test_a_round_is_done_when_everybody_has_acked_once() -> None:
    """Doubled and strange acks do not count."""
    current = AckBarrier(Step.PAUSE_GLOBAL, PauseGlobal("u1"), ("e0", "e1"), 10.0)
    assert current.on_ack("e0", ack(Step.PAUSE_GLOBAL), 12.0)
    assert not current.on_ack("e0", ack(Step.PAUSE_GLOBAL), 13.0)
    assert not current.on_ack("e9", ack(Step.PAUSE_GLOBAL), 13.0)
    assert not current.is_done
    assert current.on_ack("e1", ack(Step.PAUSE_GLOBAL), 15.0)
    assert current.is_done
    assert (current.slowest, current.slowest_ms, current.in_flight) == ("e1", 5.0, 2)


def test_a_round_does_not_wait_for_who_is_dropped() -> None:
    """Nor count them among its engines."""
    current = AckBarrier(Step.PAUSE_GLOBAL, PauseGlobal("u1"), ("e0", "e1"), 10.0)
    current.remove(("e1", "e9"))
    assert current.engines == 1
    assert not current.is_done
    current.remove(("e0",))
    assert current.is_done


@pytest.mark.parametrize("asked_ms", [0.0, 0.1, 1234.567891, 1e9 + 0.3])
def test_a_round_is_overdue_at_its_deadline_and_not_before(asked_ms: float) -> None:
    """At the very moment, whatever the fractions: a timer set for it must not spin."""
    current = AckBarrier(Step.PAUSE_GLOBAL, PauseGlobal("u1"), ("e0",), asked_ms)
    deadline_ms = asked_ms + 333.3
    assert not current.overdue(333.3, deadline_ms - 0.5)
    assert current.overdue(333.3, deadline_ms)
    assert not current.overdue(333.3, deadline_ms)
