"""The broker's sleep machine: every state and every event, and its invariants."""

from __future__ import annotations

from itertools import product

import pytest

from bus._protocol.core.failures import Failure
from bus._protocol.core.instructions import Ask, StepDone, StepFailed
from bus._protocol.group.sleep import TRANSITIONS, SleepEvent, SleepMachine, SleepState
from bus.messages import NackCode, Sleep, SleepLevel, Step, Wake
from tests.unit.bus._builders import LOST, ack
from tests.unit.bus._tables import check_event

MEMBERS = {"e0": "e0", "e1": "dp1", "e2": "dp1"}
REFUSED = Failure(NackCode.ENGINE_FAILED, "no room", peer="e1")
_S = SleepState


def asleep(level: SleepLevel = 1) -> SleepMachine:
    """A group that sleeps."""
    sleep = SleepMachine()
    sleep.sleep(Sleep("u1", level), MEMBERS, 0.0)
    for name in MEMBERS:
        sleep.on_ack(name, ack(Step.SLEEP), 1.0)
    assert sleep.state is _S.ASLEEP
    return sleep


@pytest.mark.parametrize(("state", "event"), list(product(SleepState, SleepEvent)))
def test_the_table_says_what_follows_and_refuses_the_rest(
    state: SleepState, event: SleepEvent
) -> None:
    """An event that the table does not have in a state raises, and the state stays."""
    check_event(SleepMachine(), TRANSITIONS, state, event)


def test_all_ranks_are_asked_at_once_and_the_last_ack_ends_it() -> None:
    """To sleep, and to wake."""
    sleep = SleepMachine()
    ask = Sleep("u1", 1)
    assert sleep.sleep(ask, MEMBERS, 0.0) == [Ask(ask, ("e0", "e1", "e2"))]
    assert sleep.on_ack("e0", ack(Step.SLEEP), 1.0) == []
    assert sleep.on_ack("e1", ack(Step.SLEEP), 2.0) == []
    (done,) = sleep.on_ack("e2", ack(Step.SLEEP), 3.0)
    assert isinstance(done, StepDone)
    assert (done.barrier.step, done.barrier.engines, done.barrier.slowest) == (Step.SLEEP, 3, "e2")
    wake = Wake("u1")
    assert sleep.wake(wake, MEMBERS, 4.0) == [Ask(wake, ("e0", "e1", "e2"))]
    for name in MEMBERS:
        said = sleep.on_ack(name, ack(Step.WAKE), 5.0)
    assert [type(each) for each in said] == [StepDone]
    assert sleep.state is _S.WEIGHTS_AWAKE


@pytest.mark.parametrize("step", [Step.SLEEP, Step.WAKE])
def test_an_ack_that_is_not_awaited_changes_nothing(step: Step) -> None:
    """Another step's, another pause's, a stranger's and a doubled ack are all nothing."""
    sleep = SleepMachine()
    sleep.sleep(Sleep("u1", 1), MEMBERS, 0.0)
    assert sleep.on_ack("e0", ack(step, "u0"), 1.0) == []
    assert sleep.on_ack("stranger", ack(step), 1.0) == []
    assert sleep.on_ack("e0", ack(Step.WAKE), 1.0) == []
    for _ in range(2):
        assert sleep.on_ack("e0", ack(Step.SLEEP), 1.0) == []
    assert sleep.barrier is not None
    assert sleep.barrier.waiting == {"e1", "e2"}


@pytest.mark.parametrize(
    ("waking", "following"), [(False, _S.ASLEEP), (True, _S.ASLEEP)], ids=["sleep", "wake"]
)
def test_who_refuses_holds_up_nobody(waking: bool, following: SleepState) -> None:
    """The others are awaited, then the trainer hears the first reason."""
    sleep = asleep() if waking else SleepMachine()
    step = Step.WAKE if waking else Step.SLEEP
    if waking:
        sleep.wake(Wake("u1"), MEMBERS, 2.0)
    else:
        sleep.sleep(Sleep("u1", 1), MEMBERS, 2.0)
    assert sleep.on_refused("e1", step, REFUSED) == []
    assert sleep.on_refused("e1", step, Failure(NackCode.TIMEOUT, "again")) == []
    assert sleep.on_ack("e0", ack(step), 3.0) == []
    (failed,) = sleep.on_ack("e2", ack(step), 3.0)
    assert failed == StepFailed(step, REFUSED)
    assert sleep.state is following


def test_with_a_rank_its_whole_dp_group_falls_out() -> None:
    """The trainer hears of it when the others sleep."""
    sleep = SleepMachine()
    sleep.sleep(Sleep("u1", 2), MEMBERS, 0.0)
    assert sleep.on_lost("e2", LOST) == []
    (failed,) = sleep.on_ack("e0", ack(Step.SLEEP), 1.0)
    assert failed == StepFailed(Step.SLEEP, LOST)
    assert sleep.discarded == {"e0", "e1"}


def test_the_last_one_to_be_lost_ends_the_round() -> None:
    """Nobody is waited for any more."""
    sleep = SleepMachine()
    sleep.sleep(Sleep("u1", 1), {"e0": "e0"}, 0.0)
    assert sleep.on_lost("e0", LOST) == [StepFailed(Step.SLEEP, LOST)]
    assert sleep.barrier is None


def test_discarded_weights_are_known_from_the_asking_to_the_commit() -> None:
    """Level 1 discards none; the end of the pause forgets them."""
    assert asleep(1).discarded == set()
    sleep = SleepMachine()
    sleep.sleep(Sleep("u1", 2), MEMBERS, 0.0)
    assert sleep.discarded == set(MEMBERS)
    sleep = asleep(2)
    sleep.wake(Wake("u1"), MEMBERS, 2.0)
    assert sleep.discarded == set(MEMBERS)
    sleep.on_committed(["e0", "e1"])
    assert sleep.discarded == {"e2"}
    assert sleep.over() == []
    assert (sleep.state, sleep.discarded) == (_S.AWAKE, set())


def test_a_pause_that_ends_ends_the_round() -> None:
    """What had gone wrong by then, the trainer hears; a late ack is nothing."""
    sleep = asleep()
    sleep.wake(Wake("u1"), MEMBERS, 2.0)
    sleep.on_refused("e1", Step.WAKE, REFUSED)
    assert sleep.over() == [StepFailed(Step.WAKE, REFUSED)]
    assert sleep.on_ack("e0", ack(Step.WAKE), 3.0) == []
    assert sleep.over() == []
    assert sleep.state is _S.AWAKE
