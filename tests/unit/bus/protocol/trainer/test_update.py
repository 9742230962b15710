"""The trainer's machine of one update, without a bus."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from bus._protocol.core.state_table import IllegalTransition
from bus._protocol.trainer.pause_window import PauseWindow
from bus._protocol.trainer.update import TrainerUpdate, UpdateRequest
from bus._protocol.trainer.update import TrainerUpdateState as State
from bus.errors import BusTimeout, Refused, UpdateFailed, WavebusError, refusal
from bus.messages import (
    Abort,
    Arm,
    Commit,
    GroupAck,
    Message,
    NackCode,
    PauseLocal,
    Resume,
    Sleep,
    Staging,
    StaleEngines,
    Step,
    UpdateFinish,
    UpdateStart,
    Wake,
)
from tests.sim.makers import make_manifest, make_nack

if TYPE_CHECKING:
    from collections.abc import Sequence

ACK = GroupAck(Step.ARM, "u1", 4, 1, (), 0, "", 0.0, 0.0, 0.0, (), ())
REQUEST = UpdateRequest(PauseLocal("u1", "keep", True, 6000, 60_000, 0, "keep"))
STAGING = Staging(required=False, budget_bytes=0, keep=False, clear_cache=True)
EPOCH = 7


def kinds(messages: Sequence[Message]) -> list[type]:
    return [type(message) for message in messages]


class Run:
    """One update with the window that it shares with the trainer's pauses."""

    def __init__(self, request: UpdateRequest = REQUEST) -> None:
        self.window = PauseWindow()
        self.update = TrainerUpdate(self.window, request)

    def hold(self, *, asleep: bool = False) -> None:
        """The trainer has paused the group before."""
        self.window.on_acked(structs.replace(REQUEST.pause, update_id="p0"), EPOCH)
        if asleep:
            self.window.on_asked(Sleep("p0", 1), EPOCH)

    def arm(self) -> list[Message]:
        return self.update.arm(make_manifest(), version=3, label="", backend="sim", communicator=0)

    def ack(self, messages: list[Message], ack: GroupAck = ACK) -> list[Message]:
        """The broker acknowledges all of them; what follows."""
        following: list[Message] = []
        for message in messages:
            self.window.on_over(message)
            self.window.on_acked(message, EPOCH)
            following += self.update.on_acked(message, ack)
        return following

    def refuse(self, message: Message, code: NackCode) -> list[Message]:
        return self.update.on_refused(message, refused(Step.ARM, code))

    def reach(self, state: State) -> None:
        """Go the usual way until it is in this state."""
        update = self.update
        for ask in (self.arm, update.start, update.finish, partial(update.commit, "", ())):
            if update.state is state:
                return
            for message in ask():
                if update.state is state:
                    return
                if not isinstance(message, Resume):
                    self.ack([message])
        assert update.state is state


def refused(step: Step, code: NackCode) -> Refused:
    return refusal(make_nack(code, step=step.value, update_id="u1"))


def test_an_update_pauses_and_resumes_its_group() -> None:
    """FINISH is asked for once, and COMMIT has the version that ARM was answered with."""
    run = Run()
    run.ack(run.arm())
    started = run.update.start()
    assert kinds(started) == [PauseLocal, UpdateStart]
    run.ack(started)
    assert kinds(run.update.finish()) == [UpdateFinish]
    assert run.update.finish() == []
    commit = run.update.commit("step 1", ())
    assert commit == [Commit("u1", 4, "step 1", ()), Resume("u1")]
    run.ack(commit)
    assert (run.update.version, run.window.is_open) == (4, False)
    assert run.update.undo() == []


def test_a_pause_that_was_held_before_stays() -> None:
    """It is neither made again nor ended, whether the update is committed or undone."""
    for is_committed in (True, False):
        run = Run()
        run.hold()
        run.ack(run.arm())
        started = run.update.start()
        assert kinds(started) == [UpdateStart]
        run.ack(started)
        if is_committed:
            run.update.finish()
            assert kinds(run.update.commit("", ())) == [Commit]
        else:
            assert kinds(run.update.undo()) == [Abort]
        assert run.window.is_open


def test_a_staged_update_takes_no_pause() -> None:
    """Chunks follow when engines have started; if engines can't stage it, it takes a pause."""
    run = Run(replace(REQUEST, staging=STAGING))
    run.ack(run.arm())
    started = run.update.start()
    assert started == [UpdateStart("u1", staged=True)]
    assert not run.update.takes_chunks
    run.ack(started)
    assert run.update.takes_chunks
    run.update.finish()
    assert kinds(run.update.commit("", ())) == [Commit]
    other = Run(replace(REQUEST, staging=STAGING))
    other.ack(other.arm(), structs.replace(ACK, why_paused="no memory"))
    assert other.update.start() == [REQUEST.pause, UpdateStart("u1", staged=False)]


def test_chunks_follow_the_pause_before_engines_have_started() -> None:
    run = Run()
    run.ack(run.arm())
    pause, _start = run.update.start()
    assert not run.update.takes_chunks
    run.ack([pause])
    assert run.update.takes_chunks


def test_weights_that_sleep_are_woken_before_they_are_armed() -> None:
    """In the pause that is held."""
    run = Run()
    run.hold(asleep=True)
    woken = run.arm()
    assert woken == [Wake("p0")]
    assert kinds(run.ack(woken)) == [Arm]


def test_an_engine_that_an_earlier_trainer_left_asleep_is_woken_once() -> None:
    """In a pause of the update's own, which its end ends."""
    run = Run()
    (arm,) = run.arm()
    paused = run.refuse(arm, NackCode.ENGINE_ASLEEP)
    assert paused == [REQUEST.pause]
    woken = run.ack(paused)
    assert woken == [Wake("u1")]
    assert kinds(run.ack(woken)) == [Arm]
    with pytest.raises(Refused):
        run.refuse(arm, NackCode.ENGINE_ASLEEP)
    assert kinds(run.update.undo()) == [Resume]


def test_an_update_whose_arm_was_refused_is_armed_again() -> None:
    """With a transport that is opened anew; nothing of it is to be undone meanwhile."""
    run = Run()
    (arm,) = run.arm()
    with pytest.raises(Refused):
        run.refuse(arm, NackCode.TRANSFER_CLOSED)
    assert kinds(run.arm()) == [Arm]
    with pytest.raises(Refused):
        run.refuse(arm, NackCode.TRANSFER_CLOSED)
    assert run.update.undo() == []


def test_a_catch_up_brings_the_version_that_they_lack() -> None:
    """To these DP groups alone, and never staged."""
    run = Run(replace(REQUEST, staging=STAGING, catch_up=StaleEngines(9, ("dp0",))))
    (arm,) = run.arm()
    assert isinstance(arm, Arm)
    assert (arm.version, arm.scope, arm.staging) == (9, ("dp0",), None)


def test_probes_come_before_the_commit() -> None:
    """ARM says what the pause leaves of requests: of the pause that is held, if there is one."""
    run = Run(replace(REQUEST, has_canary=True))
    run.window.on_acked(structs.replace(REQUEST.pause, update_id="p0", mode="abort"), EPOCH)
    (arm,) = run.arm()
    assert isinstance(arm, Arm)
    assert arm.canary == "abort"
    run.ack([arm])
    run.ack(run.update.start())
    run.ack(run.update.finish())
    with pytest.raises(IllegalTransition, match="before the probes"):
        run.update.commit("", ())
    run.update.probe()
    with pytest.raises(IllegalTransition):
        run.update.commit("", ())
    run.update.on_probed()
    assert kinds(run.update.commit("", ())) == [Commit]


@pytest.mark.parametrize(
    ("state", "undone"),
    [
        (State.IDLE, []),
        (State.ARMING, [Abort]),
        (State.ARMED, [Abort]),
        (State.STARTING, [Abort, Resume]),
        (State.LOADING, [Abort, Resume]),
        (State.FINISHING, [Abort, Resume]),
        (State.FINISHED, [Abort, Resume]),
        (State.COMMITTING, [Abort, Resume]),
        (State.COMMITTED, [Resume]),
    ],
)
def test_what_was_begun_is_undone_once(state: State, undone: list[type]) -> None:
    """And nothing is asked for any more."""
    run = Run()
    run.reach(state)
    assert kinds(run.update.undo()) == undone
    with pytest.raises(IllegalTransition):
        run.update.undo()
    with pytest.raises(IllegalTransition):
        run.update.start()
    with pytest.raises(IllegalTransition):
        run.update.commit("", ())
    assert run.update.finish() == []


def test_a_broker_that_knows_of_no_pause_has_resumed() -> None:
    """One that was restarted; the update is committed all the same."""
    run = Run()
    run.reach(State.COMMITTED)
    assert run.refuse(Resume("u1"), NackCode.WRONG_STATE) == []
    assert run.update.undo() == []
    other = Run()
    other.reach(State.COMMITTED)
    with pytest.raises(Refused):
        other.refuse(Resume("u1"), NackCode.TIMEOUT)
    assert kinds(other.update.undo()) == [Resume]


@pytest.mark.parametrize(
    ("error", "state", "outcome"),
    [
        (refused(Step.ARM, NackCode.TIMEOUT), State.ARMED, "not_committed"),
        (refused(Step.FINISH, NackCode.TIMEOUT), State.COMMITTING, "not_committed"),
        (
            refused(Step.COMMIT, NackCode.WRONG_STATE),
            State.COMMITTING,
            "not_committed",
        ),
        (refused(Step.COMMIT, NackCode.TIMEOUT), State.COMMITTING, "unknown"),
        (refused(Step.COMMIT, NackCode.FENCED), State.COMMITTING, "unknown"),
        # As the broker refuses a frame before it looks at the step.
        (UpdateFailed(make_nack(NackCode.FENCED)), State.COMMITTING, "unknown"),
        (refused(Step.RESUME, NackCode.TIMEOUT), State.COMMITTING, "unknown"),
        (refused(Step.CHUNK, NackCode.PEER_LOST), State.COMMITTING, "not_committed"),
        (BusTimeout("no answer"), State.LOADING, "not_committed"),
        (BusTimeout("no answer"), State.COMMITTING, "unknown"),
        (refused(Step.RESUME, NackCode.TIMEOUT), State.COMMITTED, "committed"),
    ],
)
def test_an_error_says_whether_engines_serve_the_version(
    error: WavebusError, state: State, outcome: str
) -> None:
    run = Run()
    run.reach(state)
    run.update.describe_end(error)
    assert (error.version, error.outcome) == (4, outcome)


def test_an_error_before_the_update_was_armed_has_no_version() -> None:
    error = BusTimeout("no answer")
    Run().update.describe_end(error)
    assert (error.version, error.outcome) == (0, "not_committed")
