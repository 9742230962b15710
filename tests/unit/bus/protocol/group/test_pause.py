"""The broker's pause machine: every state and every event, and its invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from msgspec import structs

from bus._protocol.core.failures import Failure
from bus._protocol.core.instructions import Ask, StepDone, StepFailed
from bus._protocol.core.state_table import IllegalTransition
from bus._protocol.group.pause import TRANSITIONS, PauseEvent, PauseMachine, PauseState
from bus.messages import NackCode, PauseGlobal, PauseLocal, Resume, Step
from tests.unit.bus._builders import LOST, ack
from tests.unit.bus._tables import check_event

MEMBERS = {"e0": "e0", "e1": "dp1", "e2": "dp1"}
VERSION = 7  # that the group serves
ASK = PauseLocal("u1", "keep", True, 30_000, 60_000, 0, "keep")
ALONE = {"e0": "e0", "e1": "e1", "e2": "e2"}  # engines without peer ranks
ASK_ONCE = structs.replace(ASK, one_phase=True)


def machine(state: PauseState, members: dict[str, str] = MEMBERS) -> PauseMachine:
    """A machine that was brought to this state the long way."""
    pause = PauseMachine(version=lambda: VERSION)
    if state is PauseState.RUNNING:
        return pause
    pause.ask(ASK, members, 0.0)
    if state is PauseState.LOCAL:
        return pause
    if members is not ALONE:
        all_ack(pause, Step.PAUSE_LOCAL)
    if state is PauseState.GLOBAL:
        return pause
    all_ack(pause, Step.PAUSE_GLOBAL)
    if state is PauseState.PAUSED:
        return pause
    pause.resume(5.0)
    assert pause.state is PauseState.RESUMING
    return pause


def all_ack(pause: PauseMachine, step: Step) -> list[Ask | StepDone | StepFailed]:
    """Everybody acks; what came of it."""
    said: list[Ask | StepDone | StepFailed] = []
    for name in list(pause.members):
        said += pause.on_ack(name, ack(step), 1.0)
    return said


def snapshot(pause: PauseMachine) -> tuple[object, ...]:
    """Everything that a refused event must leave alone."""
    waiting = frozenset(pause.barrier.waiting) if pause.barrier else None
    return (
        pause.state,
        pause.update_id,
        dict(pause.members),
        waiting,
        pause.failure,
        pause.deadline_ms,
    )


@pytest.mark.parametrize(("state", "event"), list(product(PauseState, PauseEvent)))
def test_the_table_says_what_follows_and_refuses_the_rest(
    state: PauseState, event: PauseEvent
) -> None:
    """An event that the table does not have in a state raises, and the state stays."""
    check_event(PauseMachine(), TRANSITIONS, state, event)


@pytest.mark.parametrize("state", [s for s in PauseState if s is not PauseState.RUNNING])
def test_a_second_pause_is_illegal_and_changes_nothing(state: PauseState) -> None:
    """One pause at a time."""
    pause = machine(state)
    before = snapshot(pause)
    with pytest.raises(IllegalTransition):
        pause.ask(PauseLocal("u2", "keep", True, 1, 1, 0, "keep"), {"e9": "e9"}, 9.0)
    assert snapshot(pause) == before


@pytest.mark.parametrize("state", [PauseState.RESUMING])
def test_a_second_resume_is_illegal_and_changes_nothing(state: PauseState) -> None:
    """No engine is asked to resume twice."""
    pause = machine(state)
    before = snapshot(pause)
    with pytest.raises(IllegalTransition):
        pause.resume(9.0)
    assert snapshot(pause) == before


@pytest.mark.parametrize(
    ("state", "step"), list(product(PauseState, [Step.PAUSE_LOCAL, Step.PAUSE_GLOBAL, Step.RESUME]))
)
def test_an_ack_that_is_not_awaited_changes_nothing(state: PauseState, step: Step) -> None:
    """Another step's, another pause's, a stranger's and a doubled ack are all nothing."""
    pause = machine(state)
    awaited = pause.barrier.step if pause.barrier else None
    before = snapshot(pause)
    assert pause.on_ack("e0", ack(step, "u0"), 1.0) == []
    assert pause.on_ack("stranger", ack(step), 1.0) == []
    if step is not awaited:
        assert pause.on_ack("e0", ack(step), 1.0) == []
    else:
        assert pause.on_ack("e0", ack(step), 1.0) == []
        before = snapshot(pause)
        assert pause.on_ack("e0", ack(step), 1.0) == []
    assert snapshot(pause) == before


def test_all_ranks_are_asked_at_once() -> None:
    """One ask holds every engine, so that no rank waits for another."""
    pause = PauseMachine()
    assert pause.ask(ASK, MEMBERS, 0.0) == [Ask(ASK, ("e0", "e1", "e2"))]
    assert pause.state is PauseState.LOCAL


def test_engines_without_peer_ranks_pause_in_one_phase() -> None:
    """They are asked once, and paused is said after the last ack, as of two phases."""
    pause = PauseMachine()
    assert pause.ask(ASK, ALONE, 0.0) == [Ask(ASK_ONCE, ("e0", "e1", "e2"))]
    assert pause.state is PauseState.GLOBAL
    for name in ("e2", "e0"):
        assert pause.on_ack(name, ack(Step.PAUSE_GLOBAL), 1.0) == []
    (done,) = pause.on_ack("e1", ack(Step.PAUSE_GLOBAL), 7.0)
    assert isinstance(done, StepDone)
    assert (done.barrier.step, done.barrier.slowest, done.barrier.engines) == (
        Step.PAUSE_GLOBAL,
        "e1",
        3,
    )
    assert pause.state is PauseState.PAUSED
    assert pause.deadline_ms is None


@pytest.mark.parametrize("asked", [ASK, ASK_ONCE])
@pytest.mark.parametrize("members", [MEMBERS, {"e1": "dp1", "e2": "dp1"}])
def test_one_dp_group_of_two_ranks_gives_the_whole_pause_two_phases(
    asked: PauseLocal, members: dict[str, str]
) -> None:
    """Whatever a trainer has put into the broker's field."""
    pause = PauseMachine()
    assert pause.ask(asked, members, 0.0) == [Ask(ASK, tuple(members))]
    assert pause.state is PauseState.LOCAL


def test_who_has_not_answered_is_asked_for_the_one_phase_again() -> None:
    """And nobody else."""
    pause = machine(PauseState.GLOBAL, ALONE)
    pause.on_ack("e1", ack(Step.PAUSE_GLOBAL), 1.0)
    assert pause.retry() == [Ask(ASK_ONCE, ("e0", "e2"))]


def test_a_pause_of_one_phase_and_one_of_two_follow_each_other() -> None:
    """Nothing of the first is left for the second."""
    pause = machine(PauseState.PAUSED, ALONE)
    pause.resume(2.0)
    all_ack(pause, Step.RESUME)
    assert pause.ask(ASK, MEMBERS, 3.0) == [Ask(ASK, ("e0", "e1", "e2"))]
    all_ack(pause, Step.PAUSE_LOCAL)
    assert pause.on_ack("e1", ack(Step.PAUSE_LOCAL), 4.0) == []
    all_ack(pause, Step.PAUSE_GLOBAL)
    assert pause.state is PauseState.PAUSED


def test_phase_two_follows_the_last_ack_of_phase_one() -> None:
    """PAUSE_GLOBAL is asked of nobody while one rank has not acked PAUSE_LOCAL."""
    pause = machine(PauseState.LOCAL)
    assert pause.on_ack("e0", ack(Step.PAUSE_LOCAL), 1.0) == []
    assert pause.on_ack("e1", ack(Step.PAUSE_LOCAL), 1.0) == []
    assert pause.state is PauseState.LOCAL
    done, ask = pause.on_ack("e2", ack(Step.PAUSE_LOCAL), 1.0)
    assert isinstance(done, StepDone)
    assert done.barrier.step is Step.PAUSE_LOCAL
    assert ask == Ask(PauseGlobal("u1"), ("e0", "e1", "e2"))


def test_paused_is_said_after_the_last_ack_of_phase_two() -> None:
    """Not before, whoever is slow."""
    pause = machine(PauseState.GLOBAL)
    assert pause.on_ack("e2", ack(Step.PAUSE_GLOBAL), 1.0) == []
    assert pause.on_ack("e0", ack(Step.PAUSE_GLOBAL), 1.0) == []
    assert pause.state is PauseState.GLOBAL
    (done,) = pause.on_ack("e1", ack(Step.PAUSE_GLOBAL), 7.0)
    assert isinstance(done, StepDone)
    assert (done.barrier.step, done.barrier.slowest) == (Step.PAUSE_GLOBAL, "e1")
    assert pause.state is PauseState.PAUSED
    assert pause.deadline_ms is None


def test_a_resume_is_asked_of_everybody_and_told_when_all_have_resumed() -> None:
    """The machine is ready for the next pause only then."""
    pause = machine(PauseState.PAUSED)
    assert pause.resume(5.0) == [Ask(Resume("u1", VERSION), ("e0", "e1", "e2"))]
    (done,) = all_ack(pause, Step.RESUME)
    assert isinstance(done, StepDone)
    assert done.barrier.step is Step.RESUME
    assert pause.state is PauseState.RUNNING
    assert not pause.members


HALF_MADE = [
    (PauseState.LOCAL, MEMBERS),
    (PauseState.GLOBAL, MEMBERS),
    (PauseState.GLOBAL, ALONE),
]


@pytest.mark.parametrize(("state", "members"), HALF_MADE)
def test_a_resume_asked_too_early_undoes_nothing(
    state: PauseState, members: dict[str, str]
) -> None:
    """It is noted as the failure; the pause is completed on all, then all resume."""
    pause = machine(state, members)
    assert pause.resume(2.0) == []
    assert pause.state is state
    assert pause.failure is not None
    assert pause.failure.code is NackCode.CANCELLED
    if state is PauseState.LOCAL:
        all_ack(pause, Step.PAUSE_LOCAL)
    (ask,) = all_ack(pause, Step.PAUSE_GLOBAL)
    assert ask == Ask(Resume("u1", VERSION), ("e0", "e1", "e2"))
    assert pause.state is PauseState.RESUMING
    failed, resumed = all_ack(pause, Step.RESUME)
    assert isinstance(failed, StepFailed)
    assert isinstance(resumed, StepDone)


@pytest.mark.parametrize("state", [PauseState.LOCAL, PauseState.GLOBAL])
def test_an_engine_lost_on_the_way_takes_its_dp_group_along(state: PauseState) -> None:
    """The pause is completed on whoever is left, reported as failed, and resumed once."""
    pause = machine(state)
    assert pause.on_lost("e1", LOST, 2.0) == []
    assert pause.members == {"e0": "e0"}
    if state is PauseState.LOCAL:
        pause.on_ack("e0", ack(Step.PAUSE_LOCAL), 3.0)
    (ask,) = pause.on_ack("e0", ack(Step.PAUSE_GLOBAL), 4.0)
    assert ask == Ask(Resume("u1", VERSION), ("e0",))
    failed, _ = pause.on_ack("e0", ack(Step.RESUME), 5.0)
    assert failed == StepFailed(Step.PAUSE_GLOBAL, LOST)


def test_the_last_one_waited_for_being_lost_completes_the_round() -> None:
    """Nobody waits for the dead."""
    pause = machine(PauseState.GLOBAL)
    pause.on_ack("e0", ack(Step.PAUSE_GLOBAL), 3.0)
    (ask,) = pause.on_lost("e2", LOST, 4.0)
    assert ask == Ask(Resume("u1", VERSION), ("e0",))
    assert pause.state is PauseState.RESUMING


def test_an_engine_lost_while_paused_leaves_the_others_paused() -> None:
    """The trainer goes on with them."""
    pause = machine(PauseState.PAUSED)
    assert pause.on_lost("e0", LOST, 3.0) == []
    assert pause.state is PauseState.PAUSED
    assert pause.resume(4.0) == [Ask(Resume("u1", VERSION), ("e1", "e2"))]


def test_an_engine_lost_while_resuming_is_not_waited_for() -> None:
    """The resume ends with those that are left."""
    pause = machine(PauseState.RESUMING)
    pause.on_ack("e0", ack(Step.RESUME), 6.0)
    (done,) = pause.on_lost("e2", LOST, 7.0)
    assert isinstance(done, StepDone)
    assert pause.state is PauseState.RUNNING


@pytest.mark.parametrize(
    ("state", "members"),
    [(s, MEMBERS) for s in PauseState if s is not PauseState.RUNNING]
    + [(PauseState.GLOBAL, ALONE)],
)
def test_with_nobody_left_the_machine_runs_and_says_why(
    state: PauseState, members: dict[str, str]
) -> None:
    """An empty pause is over at once."""
    pause = machine(state, members)
    pause.on_lost("e0", LOST, 3.0)
    if members is ALONE:
        pause.on_lost("e2", LOST, 3.0)
    said = pause.on_lost("e1", LOST, 3.0)
    made = state in (PauseState.PAUSED, PauseState.RESUMING)
    expected = [Step.RESUME] if made else [Step.PAUSE_GLOBAL, Step.RESUME]
    assert [each.step for each in said if isinstance(each, StepFailed)] == expected
    assert pause.state is PauseState.RUNNING
    assert pause.barrier is None


@pytest.mark.parametrize("state", PauseState)
def test_a_stranger_that_is_lost_changes_nothing(state: PauseState) -> None:
    """Only members count."""
    pause = machine(state)
    before = snapshot(pause)
    assert pause.on_lost("stranger", LOST, 3.0) == []
    assert snapshot(pause) == before


def test_an_engine_that_cannot_pause_fails_the_pause_and_the_first_reason_stays() -> None:
    """The others are paused all the same, then resumed."""
    pause = machine(PauseState.GLOBAL)
    why = Failure(NackCode.ENGINE_FAILED, "no", peer="e0")
    pause.on_refused("e0", why, 2.0)
    pause.on_lost("stranger", LOST, 2.0)
    pause.fail(LOST)
    assert pause.failure == why
    all_ack(pause, Step.PAUSE_GLOBAL)
    failed, _ = all_ack(pause, Step.RESUME)
    assert failed == StepFailed(Step.PAUSE_GLOBAL, why)


@pytest.mark.parametrize(("state", "members"), HALF_MADE)
def test_when_time_is_over_the_caller_hears_it_and_the_pause_goes_on(
    state: PauseState, members: dict[str, str]
) -> None:
    """A call that timed out is still pending: it is completed, then resumed."""
    pause = machine(state, members)
    assert pause.expire(59_999.0) == []
    (failed,) = pause.expire(60_000.0)
    assert isinstance(failed, StepFailed)
    assert failed.failure.code is NackCode.TIMEOUT
    assert "e0, e1, e2" in failed.failure.detail
    assert pause.state is state
    assert pause.expire(99_999.0) == []
    if state is PauseState.LOCAL:
        all_ack(pause, Step.PAUSE_LOCAL)
    all_ack(pause, Step.PAUSE_GLOBAL)
    assert pause.state is PauseState.RESUMING


@pytest.mark.parametrize("state", [PauseState.RUNNING, PauseState.PAUSED, PauseState.RESUMING])
def test_a_pause_that_is_made_has_no_deadline(state: PauseState) -> None:
    """The lease ends it, not the caller's patience."""
    assert machine(state).expire(10**9) == []


def test_quarantined_engines_stay_paused() -> None:
    """They are asked nothing, and the others resume."""
    pause = machine(PauseState.PAUSED)
    pause._kept_paused = lambda: frozenset({"e1", "e2", "e7"})
    assert pause.resume(5.0) == [Ask(Resume("u1", VERSION), ("e0",))]


def test_quarantined_engines_stay_paused_when_a_pause_is_recovered() -> None:
    """A pause that failed frees nobody."""
    pause = machine(PauseState.GLOBAL)
    pause._kept_paused = lambda: frozenset({"e1", "e2"})
    pause.fail(LOST)
    (ask,) = all_ack(pause, Step.PAUSE_GLOBAL)
    assert ask == Ask(Resume("u1", VERSION), ("e0",))


def test_with_all_quarantined_nobody_is_resumed() -> None:
    """The caller hears that nobody is left, and the machine is free for the next pause."""
    pause = machine(PauseState.PAUSED)
    pause._kept_paused = lambda: frozenset(MEMBERS)
    (failed,) = pause.resume(5.0)
    assert isinstance(failed, StepFailed)
    assert (failed.step, failed.failure.code) == (Step.RESUME, NackCode.EMPTY_GROUP)
    assert pause.state is PauseState.RUNNING


CANNOT = Failure(NackCode.ENGINE_FAILED, "out of memory", peer="e1")


def test_a_rank_with_peers_that_refuses_in_phase_one_is_asked_again() -> None:
    """It stays in the round, since its peer ranks' pauses complete only with its own."""
    pause = machine(PauseState.LOCAL)
    pause.on_ack("e1", ack(Step.PAUSE_LOCAL), 1.0)
    assert pause.on_refused("e1", CANNOT, 2.0) == []
    assert pause.members == MEMBERS
    again, waiting = pause.retry()
    assert again == Ask(ASK, ("e1",))
    assert waiting == Ask(ASK, ("e0", "e2"))
    assert pause.retry() == [waiting]


def test_a_rank_with_peers_that_refuses_in_phase_two_is_asked_both_phases_again() -> None:
    """In their order, and it alone; a peer rank that has paused is not asked twice."""
    pause = machine(PauseState.GLOBAL)
    pause.on_ack("e2", ack(Step.PAUSE_GLOBAL), 2.0)
    assert pause.on_refused("e1", CANNOT, 3.0) == []
    pause.on_ack("e0", ack(Step.PAUSE_GLOBAL), 4.0)
    assert pause.state is PauseState.GLOBAL
    assert pause.retry() == [Ask(ASK, ("e1",)), Ask(PauseGlobal("u1"), ("e1",))]
    assert pause.retry() == [Ask(PauseGlobal("u1"), ("e1",))]


def test_a_rank_that_refuses_late_is_waited_for_again() -> None:
    """What it acked before, it has taken back."""
    pause = machine(PauseState.GLOBAL)
    pause.on_ack("e1", ack(Step.PAUSE_GLOBAL), 2.0)
    pause.on_refused("e1", CANNOT, 3.0)
    pause.on_ack("e0", ack(Step.PAUSE_GLOBAL), 4.0)
    assert pause.on_ack("e2", ack(Step.PAUSE_GLOBAL), 4.0) == []
    assert pause.on_ack("e1", ack(Step.PAUSE_GLOBAL), 5.0) != []


def test_a_pause_that_a_rank_refused_is_completed_then_resumed_once_and_has_failed() -> None:
    """Every rank has paused in the end, this one too; the caller hears its first reason."""
    pause = machine(PauseState.GLOBAL)
    for attempt in range(3):
        pause.on_refused("e1", replace(CANNOT, detail=f"attempt {attempt}"), 2.0)
        assert pause.retry()[0] == Ask(ASK, ("e1",))
        assert pause.on_ack("e1", ack(Step.PAUSE_LOCAL), 3.0) == []
    (ask,) = all_ack(pause, Step.PAUSE_GLOBAL)
    assert ask == Ask(Resume("u1", VERSION), ("e0", "e1", "e2"))
    failed, resumed = all_ack(pause, Step.RESUME)
    assert failed == StepFailed(Step.PAUSE_GLOBAL, replace(CANNOT, detail="attempt 0"))
    assert isinstance(resumed, StepDone)
    assert pause.state is PauseState.RUNNING


@pytest.mark.parametrize(("state", "members"), HALF_MADE)
def test_an_engine_alone_that_refuses_falls_out(state: PauseState, members: dict[str, str]) -> None:
    """Nobody waits for it: the others go on, and it is asked nothing more."""
    pause = machine(state, members)
    assert pause.on_refused("e0", replace(CANNOT, peer="e0"), 2.0) == []
    assert pause.members == {name: members[name] for name in ("e1", "e2")}
    assert all("e0" not in ask.names for ask in pause.retry() if isinstance(ask, Ask))


def test_an_engine_lost_in_the_one_phase_leaves_the_others_to_complete_it() -> None:
    """The pause has failed: they are paused, and then resumed once."""
    pause = machine(PauseState.GLOBAL, ALONE)
    pause.on_ack("e0", ack(Step.PAUSE_GLOBAL), 2.0)
    assert pause.on_lost("e1", LOST, 3.0) == []
    (ask,) = pause.on_ack("e2", ack(Step.PAUSE_GLOBAL), 4.0)
    assert ask == Ask(Resume("u1", VERSION), ("e0", "e2"))
    failed, _ = all_ack(pause, Step.RESUME)
    assert failed == StepFailed(Step.PAUSE_GLOBAL, LOST)


def test_a_rank_that_is_given_up_takes_its_peers_along_and_is_asked_no_more() -> None:
    """It has refused for too long: the others are completed and resumed without them."""
    pause = machine(PauseState.GLOBAL)
    pause.on_ack("e0", ack(Step.PAUSE_GLOBAL), 2.0)
    pause.on_refused("e1", CANNOT, 3.0)
    (ask,) = pause.on_lost("e1", Failure(NackCode.TIMEOUT, "too long", peer="e1"), 9.0)
    assert ask == Ask(Resume("u1", VERSION), ("e0",))
    assert pause.retry() == [Ask(Resume("u1", VERSION), ("e0",))]
    failed, _ = pause.on_ack("e0", ack(Step.RESUME), 10.0)
    assert failed == StepFailed(Step.PAUSE_GLOBAL, CANNOT)


def test_a_refusal_of_one_pause_is_not_asked_again_in_the_next() -> None:
    """What was still to be repeated ends with its pause."""
    pause = machine(PauseState.GLOBAL)
    pause.on_refused("e1", CANNOT, 2.0)
    all_ack(pause, Step.PAUSE_GLOBAL)
    all_ack(pause, Step.RESUME)
    pause.ask(structs.replace(ASK, update_id="u2"), MEMBERS, 9.0)
    assert pause.retry() == [Ask(structs.replace(ASK, update_id="u2"), ("e0", "e1", "e2"))]


def test_a_rank_that_refuses_to_resume_is_asked_to_resume_again() -> None:
    """It is paused, and its peer ranks wait for it in the same barrier."""
    pause = machine(PauseState.RESUMING)
    for name in ("e0", "e2"):
        pause.on_ack(name, ack(Step.RESUME), 6.0)
    assert pause.on_refused("e1", CANNOT, 7.0) == []
    assert pause.retry() == [Ask(Resume("u1", VERSION), ("e1",))]
    (done,) = pause.on_ack("e1", ack(Step.RESUME), 8.0)
    assert isinstance(done, StepDone)


@pytest.mark.parametrize("state", [PauseState.RUNNING, PauseState.PAUSED])
def test_nobody_is_asked_again_when_nothing_is_asked(state: PauseState) -> None:
    """There is no round."""
    assert machine(state).retry() == []


def test_in_flight_requests_are_those_of_the_fuller_phase() -> None:
    """An engine that could not tell yet in phase 1 tells in phase 2."""
    pause = machine(PauseState.GLOBAL)
    (done,) = all_ack(pause, Step.PAUSE_GLOBAL)
    assert isinstance(done, StepDone)
    assert done.barrier.in_flight == 3
