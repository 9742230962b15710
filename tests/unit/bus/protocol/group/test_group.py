"""A whole group in simulated time: what happens when somebody is late, wrong or gone."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from bus._protocol.core.effects import Note
from bus._protocol.engine.calls import (
    Call,
    CallAbortRequests,
    CallCommit,
    CallPause,
    CallResume,
    CallSleep,
)
from bus._protocol.group.pause import PauseState
from bus._protocol.group.update import UpdateState
from bus.errors import ManifestRefused, PauseFailed, Refused
from bus.messages import (
    Abort,
    Arm,
    Commit,
    GroupAck,
    Message,
    Nack,
    NackCode,
    PauseGlobal,
    PauseLocal,
    Resume,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    WaitEngines,
)
from bus.operations import (
    ArmManifest,
    LoadChunk,
    Open,
    ReceiveChunk,
    Restore,
    Start,
)
from tests.sim.makers import make_arm, make_manifest, make_nack
from tests.sim.memory_network import Faults
from tests.sim.world import FAST_BROKER, GROUP
from tests.unit.bus._scene import Scene, code_of

if TYPE_CHECKING:
    from bus.messages import Envelope
    from tests.sim.engine import SimEngine
    from tests.sim.trainer import SimTrainer


def test_an_update_reaches_every_engine_with_one_pause() -> None:
    """All serve the version; each was paused once and resumed once."""
    scene = Scene(2, 1)
    scene.update()
    outcome = scene.settled()
    assert (outcome.version, outcome.excluded) == (1, ())
    assert scene.versions() == {"e0": 1, "e1": 1, "e2": 1}
    for engine in scene.world.live_engines:
        assert (engine.truth.pauses, engine.truth.resumes) == (1, 1)
        assert engine.truth.loaded == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)])
def test_engines_without_peer_ranks_are_asked_once(sizes: tuple[int, int]) -> None:
    """Beside a DP group of two ranks, all are asked twice."""
    scene = Scene(*sizes)
    scene.update()
    assert scene.settled().error is None
    for engine in scene.world.live_engines:
        asked = [each for each in engine.commands if isinstance(each, PauseLocal | PauseGlobal)]
        assert [type(each) for each in asked] == [PauseLocal, PauseGlobal][: max(sizes)]
        assert (engine.truth.pauses, engine.truth.resumes) == (1, 1)


def test_a_group_that_nobody_joined_is_unknown() -> None:
    """A pause of it is refused at once."""
    scene = Scene()
    scene.pause()
    assert code_of(scene.settled()) is NackCode.UNKNOWN_GROUP


def test_a_group_whose_engines_are_gone_is_empty() -> None:
    """Left or dead, that is another refusal than a wrong name."""
    scene = Scene(1)
    scene.engine("e0").leave()
    scene.world.run_for(10.0)
    scene.pause()
    assert code_of(scene.settled()) is NackCode.EMPTY_GROUP


def test_a_second_trainer_waits_until_the_first_is_gone() -> None:
    """Then it has the group, with a new epoch."""
    scene = Scene(1)
    other = scene.world.add_trainer("other")
    scene.world.run_for(1000.0)
    assert not other.is_joined
    assert other.nacks[NackCode.GROUP_HELD] > 0
    scene.trainer.leave()
    assert scene.world.run_until(lambda: other.is_joined, within_ms=1000.0)
    assert scene.world.existing_group.epoch == 2


def test_a_dead_engines_name_is_taken_over_when_it_is_missed() -> None:
    """Until then its next life is refused and tries again."""
    scene = Scene(1)
    scene.engine("e0").kill()
    reborn = scene.world.restart_engine("e0")
    scene.world.run_for(1500.0)
    assert not reborn.is_joined
    assert scene.world.run_until(lambda: reborn.is_joined, within_ms=2000.0)
    scene.update()
    assert scene.settled().version == 1


@pytest.mark.parametrize("cut_ms", [500.0, 4000.0])
def test_an_engine_that_was_cut_off_joins_again(cut_ms: float) -> None:
    """Missed or not, it is the same life, and one peer."""
    scene = Scene(1, 1)
    scene.world.network.cut(scene.engine("e0").route)
    scene.world.run_for(cut_ms)
    scene.world.network.heal(scene.engine("e0").route)
    assert scene.world.run_until(lambda: scene.engine("e0").is_joined and scene.world.has_joined())
    scene.update()
    assert scene.settled().version == 1


def test_a_refusal_at_arm_leaves_nothing_armed_and_all_running() -> None:
    """It names engine and tensor; no engine was paused, and the old weights serve on."""
    scene = Scene(2, 1)
    scene.engine("e2").truth.weights["extra"] = 0
    scene.update()
    outcome = scene.settled()
    assert isinstance(outcome.error, ManifestRefused)
    assert (outcome.error.nack.peer, outcome.error.nack.tensor) == ("e2", "extra")
    for engine in scene.world.live_engines:
        assert engine.truth.pauses == 0
        assert engine.session.phase == "running"
        assert engine.truth.version == 0


def test_a_quorum_of_more_dp_groups_than_there_are_is_refused() -> None:
    """Before anybody is asked."""
    scene = Scene(2, 1)
    arm = make_arm("u9", make_manifest(), quorum=3)
    assert scene.refused(arm) is NackCode.QUORUM_MISSING
    assert scene.engine("e0").commands == []


def test_a_run_outlives_its_broker_and_the_engine_that_brought_it() -> None:
    """As long as one engine of it is left, which tells the next broker."""
    scene = Scene(1, 1)
    run = scene.world.existing_group.run
    assert run == f"{scene.engine('e0').boot:x}"
    scene.world.restart_engine("e0")
    assert scene.world.run_until(scene.world.has_joined)
    scene.engine("e0").kill()
    scene.world.restart_broker()
    assert scene.world.run_until(lambda: scene.world.has_joined(["e1"]))
    reborn = scene.world.restart_engine("e0")
    assert scene.world.run_until(lambda: reborn.is_joined)
    assert scene.world.existing_group.run == run
    assert {engine.peer.link.run for engine in scene.world.live_engines} == {run}


def test_a_lease_that_is_too_short_is_refused() -> None:
    """By the broker, before anybody is asked."""
    scene = Scene(1)
    assert scene.refused(PauseLocal("u9", "keep", True, 10, 1000, 0, "keep")) is NackCode.MALFORMED
    assert scene.engine("e0").commands == []


def test_a_dp_group_without_all_its_ranks_is_not_paused() -> None:
    """It can't step, and so a pause of it would not return; the others are paused."""
    scene = Scene(2, 1)
    scene.engine("e1").leave()
    scene.world.run_for(10.0)
    scene.pause()
    assert scene.settled().error is None
    assert scene.engine("e0").truth.pauses == 0
    assert scene.engine("e2").truth.pauses == 1
    answers = [request.answer for request in scene.trainer.requests]
    assert [answer.excluded for answer in answers if isinstance(answer, GroupAck)] == [("e0",)] * 2


def test_an_update_goes_on_without_a_dp_group_that_is_not_whole() -> None:
    """It is named in what the trainer reads, and takes part again when it is whole."""
    scene = Scene(2, 1)
    scene.engine("e1").leave()
    scene.world.run_for(10.0)
    scene.update()
    outcome = scene.settled()
    assert (outcome.version, outcome.excluded) == (1, ("e0",))
    assert scene.versions() == {"e0": 0, "e2": 1}
    scene.world.restart_engine("e1")
    assert scene.world.run_until(scene.world.has_joined)
    scene.update(8)
    outcome = scene.settled()
    assert outcome.excluded == ()
    assert scene.versions() == dict.fromkeys(("e0", "e1", "e2"), outcome.version)


@pytest.mark.parametrize("state", [PauseState.GLOBAL, PauseState.PAUSED, UpdateState.LOADING])
def test_a_late_joiner_takes_part_from_the_next_time_on(state: PauseState | UpdateState) -> None:
    """It is left alone now, and serves the next version with the others."""
    scene = Scene(1)
    scene.update()
    scene.until(state)
    late = scene.world.add_engine("late")
    assert scene.settled().version == 1
    assert late.truth.pauses == 0
    assert late.truth.version == 0
    assert scene.world.run_until(scene.world.has_joined)
    scene.update(8)
    version = scene.settled().version
    assert version > 1
    assert scene.versions() == {"e0": version, "late": version}


def test_an_engine_that_restarts_in_a_pause_is_left_out_of_the_updates_in_it() -> None:
    """Also if an update before it was made with that engine. It takes part after the pause."""
    scene = Scene(1, 1)
    scene.trainer.run(scene.trainer.update_in_pause(7, 8, hold_ms=6000.0))
    assert scene.world.run_until(lambda: scene.versions() == {"e0": 1, "e1": 1})
    scene.world.restart_engine("e1")
    outcome = scene.settled()
    assert (outcome.error, outcome.version) == (None, 2)
    assert scene.versions() == {"e0": 2, "e1": 0}
    scene.update(9)
    scene.settled()
    assert scene.versions() == {"e0": 3, "e1": 3}


def test_a_pause_whose_engines_are_all_gone_is_not_held_any_more() -> None:
    """Its trainer hears of it, so an update after it makes a pause of its own."""
    scene = Scene(1)
    scene.trainer.run(scene.trainer.update_in_pause(7, hold_ms=6000.0))
    scene.until(PauseState.PAUSED)
    assert scene.world.run_until(lambda: scene.trainer.window.is_open)
    scene.world.restart_engine("e0")
    assert scene.world.run_until(lambda: not scene.trainer.window.is_open)
    scene.rest()
    assert scene.versions() == {"e0": 1}
    assert code_of(scene.trainer.outcomes[-1]) is NackCode.WRONG_STATE  # of the first pause's end
    assert scene.running() == {"e0"}


PAUSES = [PauseState.LOCAL, PauseState.GLOBAL, PauseState.PAUSED, PauseState.RESUMING]


@pytest.mark.parametrize("state", PAUSES)
@pytest.mark.parametrize("how", ["kill", "leave", "cut"])
def test_a_trainer_lost_in_a_pause_leaves_nobody_paused(state: PauseState, how: str) -> None:
    """Whatever was half made is completed, and then all resume, once."""
    scene = Scene(2, 1)
    scene.pause()
    scene.until(state)
    lose(scene, scene.trainer, how)
    scene.world.run_for(3000.0)
    scene.world.heal()
    scene.rest()
    assert scene.running() == {"e0", "e1", "e2"}
    for engine in scene.world.live_engines:
        assert engine.truth.pauses == engine.truth.resumes >= 1
        assert how == "cut" or engine.truth.pauses == 1


LOADED = {UpdateState.FINISHING, UpdateState.FINISHED}
UPDATES = [
    UpdateState.OPENING,
    UpdateState.ARMING,
    UpdateState.ARMED,
    UpdateState.STARTING,
    UpdateState.LOADING,
    UpdateState.FINISHING,
    UpdateState.FINISHED,
    UpdateState.COMMITTING,
]


@pytest.mark.parametrize("state", UPDATES)
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_a_trainer_lost_in_an_update_leaves_all_whole_or_quarantined(
    state: UpdateState, how: str
) -> None:
    """Nothing loaded: the old version runs. A part: quarantined. Committing: the new one."""
    scene = Scene(2, 1)
    scene.update()
    scene.until(state)
    if state is UpdateState.LOADING:
        assert scene.world.run_until(lambda: scene.engine("e0").truth.loaded == [0])
    lose(scene, scene.trainer, how)
    scene.world.run_for(3000.0)
    scene.rest()
    if state is UpdateState.COMMITTING:
        assert scene.versions() == {"e0": 1, "e1": 1, "e2": 1}
        assert scene.running() == {"e0", "e1", "e2"}
    elif state in LOADED:
        assert scene.running() == set()
        assert scene.reach["quarantined at the end"] == 3
        assert all(CallAbortRequests() in engine.calls for engine in scene.world.live_engines)
    elif state is not UpdateState.LOADING:
        assert scene.running() == {"e0", "e1", "e2"}
        assert scene.versions() == {"e0": 0, "e1": 0, "e2": 0}
    free(scene)


def lose(scene: Scene, who: SimTrainer | SimEngine, how: str) -> None:
    if how == "cut":
        scene.world.network.cut(who.route)
    elif how == "kill":
        who.kill()
    else:
        who.leave()


def free(scene: Scene) -> None:
    """A whole update by a new trainer brings everybody back."""
    scene.trainer = scene.world.add_trainer("next")
    assert scene.world.run_until(lambda: scene.trainer.is_joined)
    assert scene.world.run_until(scene.world.has_joined)
    scene.update(9)
    outcome = scene.settled()
    assert outcome.error is None
    names = {engine.name for engine in scene.world.live_engines}
    assert scene.running() == names
    assert scene.versions() == dict.fromkeys(names, outcome.version)


@pytest.mark.parametrize("state", [PauseState.LOCAL, PauseState.GLOBAL])
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_an_engine_lost_on_the_way_to_a_pause_is_reported(state: PauseState, how: str) -> None:
    """The pause is completed on the others and they resume; the trainer hears who it was."""
    scene = Scene(2, 1)
    scene.engine("e1").behaviour.hold.add(CallPause)
    scene.pause()
    scene.until(state)
    lose(scene, scene.engine("e1"), how)
    outcome = scene.settled()
    assert isinstance(outcome.error, PauseFailed)
    assert (outcome.error.code, outcome.error.nack.peer) == (NackCode.PEER_LOST, "e1")
    assert scene.reach["recovered forward"] == 1
    # Its peer rank waits for it: it could not step alone.
    assert scene.running() == {"e2"}
    assert scene.engine("e2").truth.pauses == 1
    scene.world.restart_engine("e1")
    scene.rest()
    assert scene.running() == {"e0", "e1", "e2"}


@pytest.mark.parametrize("state", [PauseState.PAUSED, PauseState.RESUMING])
def test_an_engine_lost_in_a_pause_does_not_hold_up_the_others(state: PauseState) -> None:
    """The pause is theirs, and they resume."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.hold.add(CallResume)
    scene.pause()
    scene.until(state)
    scene.engine("e1").kill()
    assert scene.settled().error is None
    assert scene.running() == {"e0"}


@pytest.mark.parametrize("state", UPDATES)
def test_an_engine_lost_in_an_update_is_left_out(state: UpdateState) -> None:
    """The update goes on without its DP group, and the trainer reads the names."""
    scene = Scene(1, 2)
    scene.update()
    scene.until(state)
    scene.engine("e2").kill()
    outcome = scene.settled()
    if state is UpdateState.OPENING:  # who is lost here is gone before the update begins
        assert (outcome.version, set(outcome.excluded)) == (1, {"e1"})
        return
    if state in (UpdateState.ARMING, UpdateState.ARMED) and outcome.error is not None:
        assert code_of(outcome) in (NackCode.WRONG_STATE, NackCode.PEER_LOST)
        assert "e0" in scene.running()  # and e1 waits for its peer rank
        return
    assert outcome.version == 1
    assert scene.versions()["e0"] == 1
    assert set(outcome.excluded) == {"e1", "e2"}


def test_an_update_goes_on_without_the_dp_group_of_a_rank_that_fails() -> None:
    """Both its ranks stand still, whoever of them failed, until a whole update frees them."""
    scene = Scene(2, 1)
    scene.engine("e0").behaviour.fail_next.add(LoadChunk)
    scene.update()
    outcome = scene.settled()
    assert outcome.version == 1
    assert set(outcome.excluded) == {"e0", "e1"}
    assert scene.running() == {"e2"}
    scene.world.run_for(5000.0)
    assert scene.running() == {"e2"}
    scene.update(8)
    assert scene.settled().version == 2
    assert scene.running() == {"e0", "e1", "e2"}


@pytest.mark.parametrize("kind", [ArmManifest, Start])
def test_a_failure_before_the_first_chunk_gives_the_update_up_for_all(
    kind: type[ArmManifest | Start],
) -> None:
    """Nothing is loaded anywhere, so all run on with the old version."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(kind)
    scene.update()
    outcome = scene.settled()
    assert code_of(outcome) is NackCode.ENGINE_FAILED
    assert scene.versions() == {"e0": 0, "e1": 0}
    assert "e0" in scene.running()


def test_a_resume_that_was_asked_ahead_leaves_out_who_failed_to_commit() -> None:
    """And its peer ranks: they stay paused as one, without being asked, until a whole update."""
    scene = Scene(2, 1)
    scene.trainer.pipelined = True
    failing = scene.engine("e1")
    failing.behaviour.fail_next.add(CallCommit)
    scene.update()
    scene.settled()
    assert scene.running() == {"e2"}
    assert not [each for each in failing.commands if isinstance(each, Resume)]
    scene.update(8)
    assert scene.settled().error is None
    assert scene.running() == {"e0", "e1", "e2"}


def test_an_engine_that_comes_back_in_an_old_update_leaves_it_while_another_is_under_way() -> None:
    """A trainer that tries again and again leaves no moment in which there is none."""
    scene = Scene(1, 1)
    stuck = scene.engine("e1")
    scene.update()
    scene.until(UpdateState.LOADING)
    scene.world.network.cut(stuck.route)
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    scene.engine("e0").behaviour.slow_ms[ArmManifest] = 3000.0
    scene.update(8)
    scene.until(UpdateState.ARMING)
    assert stuck.session.phase == "updating"
    scene.world.network.heal(stuck.route)
    left = scene.world.run_until(lambda: stuck.session.phase != "updating", within_ms=2000.0)
    assert left
    assert scene.world.existing_group.update.state is UpdateState.ARMING
    assert scene.settled().error is None


def test_a_start_does_not_wait_for_ever_for_a_pause() -> None:
    """Which nobody asks for: the trainer is told, and the next update is as any other."""
    scene = Scene(1)
    opening = TransferInit("u8", "sim", b"", 0, 0, {})
    for message in (opening, make_arm("u9", make_manifest(), transfer="u8")):
        scene.trainer.run(scene.trainer.ask(message))
        assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    asked_ms = scene.world.now_ms
    assert scene.refused(UpdateStart("u9")) is NackCode.TIMEOUT
    waited_ms = scene.world.now_ms - asked_ms
    assert 0 <= waited_ms - 2 * scene.world.config.step_timeout_ms < 1000.0
    scene.trainer.run(scene.trainer.ask(Abort("u9", "not paused")))
    scene.rest()
    scene.update()
    assert scene.settled().error is None


def test_a_commit_that_fails_quarantines_that_engine() -> None:
    """The others serve the version."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(CallCommit)
    scene.update()
    assert set(scene.settled().excluded) == {"e1"}
    assert scene.versions() == {"e0": 1, "e1": 0}
    assert scene.running() == {"e0"}


def test_an_engine_that_cannot_pause_fails_the_pause() -> None:
    """The others are paused and resumed; it runs as before."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(CallPause)
    scene.pause()
    outcome = scene.settled()
    assert isinstance(outcome.error, PauseFailed)
    assert scene.running() == {"e0", "e1"}
    assert (scene.engine("e0").truth.pauses, scene.engine("e0").truth.resumes) == (1, 1)


def commands(engine: SimEngine) -> list[type[Message]]:
    return [type(command) for command in engine.commands]


def pauses_called(engine: SimEngine) -> int:
    return sum(isinstance(call, CallPause) for call in engine.calls)


def test_a_rank_that_refuses_its_pause_is_asked_again_while_its_peers_wait() -> None:
    """Both phases again, for it alone; then all resume, once, and the caller hears why."""
    scene = Scene(2, 1)
    scene.engine("e1").behaviour.fail_next.add(CallPause)
    scene.engine("e0").behaviour.hold.add(CallPause)  # as a peer rank's pause is: until both agree
    scene.pause()
    assert scene.world.run_until(lambda: scene.engine("e1").truth.idle)
    assert commands(scene.engine("e1")) == [PauseLocal, PauseGlobal, PauseLocal, PauseGlobal]
    assert Resume not in commands(scene.engine("e0"))
    assert Resume not in commands(scene.engine("e2"))
    assert scene.world.existing_group.pause.state is PauseState.GLOBAL
    scene.engine("e0").release(CallPause)
    outcome = scene.settled()
    assert isinstance(outcome.error, PauseFailed)
    assert (outcome.error.code, outcome.error.nack.peer) == (NackCode.ENGINE_FAILED, "e1")
    assert "on purpose" in outcome.error.nack.detail
    assert scene.reach["recovered forward"] == 1
    assert scene.running() == {"e0", "e1", "e2"}
    for engine in scene.world.live_engines:
        assert (engine.truth.pauses, engine.truth.resumes) == (1, 1)
        assert commands(engine).count(Resume) == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_rank_may_refuse_more_than_once(times: int) -> None:
    """Each time it is asked again, and what it said first is the reason."""
    scene = Scene(2)
    refusing = scene.engine("e1")
    refusing.behaviour.fail_rate[CallPause] = 1.0
    scene.pause()
    assert scene.world.run_until(lambda: pauses_called(refusing) == times)
    refusing.behaviour.fail_rate.clear()
    refusing.behaviour.fail_next.add(CallPause)  # the call under way
    outcome = scene.settled()
    assert code_of(outcome) is NackCode.ENGINE_FAILED
    assert pauses_called(refusing) == times + 1
    assert (refusing.truth.pauses, refusing.truth.resumes) == (1, 1)
    assert scene.running() == {"e0", "e1"}


def test_a_rank_that_refuses_for_too_long_gives_its_dp_group_up() -> None:
    """For longer than a step may take: the others resume, and the caller hears of it."""
    scene = Scene(2, 1)
    scene.engine("e1").behaviour.fail_rate[CallPause] = 1.0
    scene.pause()
    within_ms = scene.world.config.step_timeout_ms + 3000.0
    began_ms = scene.world.now_ms
    assert scene.world.run_until(lambda: not scene.trainer.is_busy, within_ms=within_ms)
    assert scene.world.now_ms - began_ms > scene.world.config.step_timeout_ms
    error = scene.trainer.outcomes[-1].error
    assert isinstance(error, PauseFailed)
    assert (error.code, error.nack.peer) == (NackCode.ENGINE_FAILED, "e1")
    assert scene.world.existing_group.pause.state is PauseState.RUNNING
    assert "e2" in scene.running()
    assert scene.engine("e2").truth.resumes == 1
    scene.engine("e1").behaviour.fail_rate.clear()
    scene.rest()
    assert scene.running() == {"e0", "e1", "e2"}
    scene.update()
    assert scene.settled().error is None


@pytest.mark.parametrize("restart", [True, False])
def test_a_half_made_pause_is_found_by_heartbeats_completed_and_resumed(restart: bool) -> None:
    """One rank's pause is pending, its peer runs and knows of none: nobody else will ask it."""
    scene = Scene(2, 1)
    one, peer = scene.engine("e0"), scene.engine("e1")
    one.behaviour.hold.add(CallPause)  # as it does, until its peer rank is asked too
    if restart:
        scene.world.network.cut(peer.route)
        scene.pause()
        assert scene.world.run_until(lambda: isinstance(one.running_call, CallPause))
        scene.trainer.kill()
        scene.world.restart_broker()
        scene.world.network.heal(peer.route)
    else:
        peer.behaviour.fail_rate[CallPause] = 1.0
        scene.pause()
        within_ms = scene.world.config.step_timeout_ms + 3000.0
        assert scene.world.run_until(lambda: not scene.trainer.is_busy, within_ms=within_ms)
        peer.behaviour.fail_rate.clear()
    asked = len(peer.commands)
    assert scene.world.run_until(lambda: peer.truth.idle, within_ms=6000.0)
    assert type(peer.commands[asked]) is PauseLocal
    assert Resume not in commands(one)
    assert one.session.phase == "pausing"
    one.release(CallPause)
    scene.rest()
    assert scene.running() == {"e0", "e1", "e2"}
    assert (one.truth.pauses, one.truth.resumes) == (1, 1)
    assert (peer.truth.pauses, peer.truth.resumes) == (1, 1)


def test_a_pause_that_is_under_way_is_not_taken_for_a_half_made_one() -> None:
    """The group knows of it: it is completed by asking again, not by another pause."""
    scene = Scene(2)
    scene.engine("e0").behaviour.hold.add(CallPause)
    scene.engine("e1").behaviour.fail_rate[CallPause] = 1.0
    scene.pause()
    scene.world.run_for(5000.0)
    ids = {each.update_id for each in scene.engine("e1").commands if isinstance(each, PauseLocal)}
    assert len(ids) == 1
    asked = [each for each in scene.engine("e0").commands if isinstance(each, PauseLocal)]
    assert len(asked) == 1
    scene.world.heal()
    scene.rest()
    assert scene.running() == {"e0", "e1"}


def test_a_resume_that_fails_is_tried_again() -> None:
    """The engine says that it is paused still, and nobody else waits for it."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(CallResume)
    scene.pause()
    scene.rest()
    assert scene.running() == {"e0", "e1"}


@pytest.mark.parametrize("kind", [ArmManifest, Start, ReceiveChunk, LoadChunk, CallPause])
def test_a_step_ends_in_time_though_an_engine_lives_and_is_silent(
    kind: type[ArmManifest | Start | ReceiveChunk | LoadChunk | CallPause],
) -> None:
    """The update goes on without it, or, of a pause, the trainer hears who and what. It is left
    out of the next one, and of the routes, until it answers."""
    scene = Scene(1, 1)
    silent, group = scene.engine("e1"), scene.world.existing_group
    silent.behaviour.hold.add(kind)
    scene.update()
    within_ms = scene.world.config.step_timeout_ms + 5000.0
    assert scene.world.run_until(lambda: not scene.trainer.is_busy, within_ms=within_ms)
    outcome = scene.trainer.outcomes[-1]
    if kind is not CallPause:
        assert outcome.excluded == ("e1",)
        assert scene.engine("e0").truth.version == 1
    else:
        assert isinstance(outcome.error, Refused)
        assert outcome.error.code is NackCode.TIMEOUT
        assert outcome.error.nack.peer == "e1"
        assert re.search(r"e1 \(heard \d+ ms ago\).* pause_global", str(outcome.error))
    assert scene.engine("e0").truth.running
    routed = scene.world.run_until(
        lambda: [route.engine for route in group.routing.now.engines] == ["e0"],
        within_ms=within_ms,
    )
    assert routed
    scene.update(8)
    assert scene.world.run_until(lambda: not scene.trainer.is_busy, within_ms=5000.0)
    outcome = scene.trainer.outcomes[-1]
    assert (outcome.error, outcome.excluded) == (None, ("e1",))
    silent.release(kind)
    scene.rest()
    assert silent.truth.running is (kind is not LoadChunk)
    scene.update(9)
    assert (scene.settled().error, scene.trainer.outcomes[-1].excluded) == (None, ())
    assert scene.world.run_until(lambda: len(group.routing.now.engines) == 2)


def test_an_engine_that_opens_no_transport_is_left_out_until_it_does() -> None:
    """An ABORT of it is answered when it is over."""
    scene = Scene(1, 1)
    silent, group = scene.engine("e1"), scene.world.existing_group
    silent.behaviour.hold.add(Open)
    for payload, within_ms in ((7, scene.world.config.step_timeout_ms + 5000.0), (8, 5000.0)):
        scene.update(payload)
        assert scene.world.run_until(lambda: not scene.trainer.is_busy, within_ms=within_ms)
        assert scene.trainer.outcomes[-1].excluded == ("e1",)
        scene.world.run_for(3000.0)
        assert group.registry.unable() == {"e1"}
    silent.release(Open)
    scene.update(9)
    assert scene.settled().excluded == ()


@pytest.mark.parametrize("kind", [Open, ArmManifest, CallSleep])
def test_who_has_answered_too_late_returns_though_the_answer_is_lost(kind: type[Call]) -> None:
    """It is asked for an ABORT until it answers; or its heartbeats show that the step is over."""
    scene = Scene(1, 1)
    late, group = scene.engine("e1"), scene.world.existing_group
    late.behaviour.hold.add(kind)
    scene.trainer.run(scene.trainer.sleep(1) if kind is CallSleep else scene.trainer.update(7))
    assert scene.world.run_until(
        lambda: bool(group.registry.engines["e1"].overdue), within_ms=40_000.0
    )
    scene.world.network.cut(late.route, up=True)
    late.release(kind)
    scene.world.run_for(400.0)
    assert group.registry.engines["e1"].overdue, "its answer is lost"
    scene.world.network.heal(late.route)
    assert scene.world.run_until(lambda: not group.registry.engines["e1"].overdue)


@pytest.mark.parametrize("deaf_to", [UpdateStart, Arm, UpdateFinish])
def test_an_engine_that_is_deaf_to_a_step_does_not_hold_up_each_update(
    deaf_to: type[Message],
) -> None:
    """It answers ABORT, and so it takes part again; but after each time it is out for longer."""
    scene = Scene(1, 1)
    deaf, timeout_ms = scene.engine("e1"), scene.world.config.step_timeout_ms
    deaf.behaviour.deaf_to = {deaf_to}
    held_up = 0
    for number in range(10):
        begun_ms = scene.world.now_ms
        scene.update(7 + number)
        assert scene.settled().error is None
        held_up += scene.world.now_ms - begun_ms >= timeout_ms
        scene.world.run_for(3000.0)
    assert held_up == 2
    deaf.behaviour.deaf_to = set()
    scene.world.run_for(4 * timeout_ms)
    scene.update(30)
    assert scene.settled().excluded == ()


def test_an_update_waits_for_its_sender_and_for_no_engine() -> None:
    """To send one chunk takes longer than any step may: nobody falls out for it."""
    scene = Scene(1, 1)
    scene.trainer.send_ms = scene.world.config.step_timeout_ms + 5000.0
    scene.update()
    assert scene.world.settle(within_ms=10 * scene.trainer.send_ms)
    outcome = scene.trainer.outcomes[-1]
    assert (outcome.version, outcome.excluded) == (1, ())
    assert scene.running() == {"e0", "e1"}


def test_a_start_that_does_not_wait_for_armed_is_refused() -> None:
    """No engine hears of it; given up, the update leaves all as they were."""
    scene = Scene(1, 2)
    scene.trainer.run(scene.trainer.hasty(7))
    assert code_of(scene.settled()) is NackCode.WRONG_STATE
    for engine in scene.world.live_engines:
        assert not [call for call in engine.calls if isinstance(call, Start)]
    assert scene.versions() == {"e0": 0, "e1": 0, "e2": 0}
    assert scene.running() == {"e0", "e1", "e2"}
    scene.update(8)
    assert scene.settled().error is None


def test_an_engine_that_got_something_else_than_was_sent_falls_out_unloaded() -> None:
    """Nothing of the chunk is loaded there; the others serve the version."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.garble_next = True
    scene.update()
    assert scene.settled().excluded == ("e1",)
    assert set(scene.engine("e1").truth.weights.values()) == {0}
    assert Restore("model") in scene.engine("e1").calls
    assert scene.versions() == {"e0": 1, "e1": 0}
    assert scene.running() == {"e0", "e1"}


def test_a_mismatch_is_told_where_it_leaves_nobody() -> None:
    """The engine, the tensor and the chunk."""
    scene = Scene(1)
    scene.engine("e0").behaviour.garble_next = True
    scene.update()
    error = scene.settled().error
    assert isinstance(error, Refused)
    assert error.code is NackCode.CHECKSUM_MISMATCH
    assert (error.nack.peer, error.nack.tensor, error.nack.chunk) == ("e0", "embed", 0)


@pytest.mark.parametrize("how", ["leave", "join", "restart"])
def test_a_collective_is_made_anew_when_engines_came_or_went(how: str) -> None:
    """And only then."""
    scene = Scene(1, 2)
    scene.trainer.collective = True
    for payload in (1, 2):
        scene.update(payload)
        assert scene.settled().version == payload
    opened = [e.calls.count(e.truth.transfer) for e in scene.world.live_engines if e.truth.transfer]
    assert opened == [1, 1, 1]
    if how == "leave":
        scene.engine("e0").leave()
    elif how == "join":
        scene.world.add_engine("e9")
    else:
        scene.world.restart_engine("e0")
    scene.world.run_for(4000.0)
    scene.update(3)
    outcome = scene.settled()
    assert (outcome.error, outcome.excluded) == (None, ())
    places = [
        e.truth.transfer.place for e in scene.world.live_engines if e.truth.transfer is not None
    ]
    assert sorted(place.rank for place in places) == list(
        range(1, len(scene.world.live_engines) + 1)
    )
    assert len({place.communicator for place in places}) == 1
    assert scene.trainer.nacks[NackCode.TRANSFER_CLOSED] == 1


def test_a_pause_that_takes_too_long_is_told_and_recovered() -> None:
    """The caller's own time; the call is still pending, and both resume after it."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.hold.add(CallPause)
    scene.trainer.timeout_ms = 2000
    scene.pause()
    assert scene.world.run_until(lambda: not scene.trainer.is_busy, within_ms=3000.0)
    assert code_of(scene.trainer.outcomes[-1]) is NackCode.TIMEOUT
    assert re.search(r"e1 \(heard \d+ ms ago\)", str(scene.trainer.outcomes[-1].error))
    assert not scene.engine("e0").truth.running
    scene.engine("e1").release(CallPause)
    scene.rest()
    assert scene.running() == {"e0", "e1"}


def test_a_pause_whose_trainer_is_gone_is_not_the_next_trainers() -> None:
    """The old update is still being undone when a new trainer comes: all resume even so."""
    scene = Scene(1)
    scene.engine("e0").behaviour.hold.add(Restore)
    scene.update()
    scene.until(UpdateState.LOADING)
    scene.trainer.leave()
    scene.trainer = scene.world.add_trainer("next")
    assert scene.world.run_until(lambda: scene.trainer.is_joined)
    assert scene.world.existing_group.update.state is UpdateState.ABORTING
    scene.engine("e0").release(Restore)
    scene.rest()
    assert scene.running() == {"e0"}


def test_a_new_broker_learns_from_the_engines_how_far_fencing_has_come() -> None:
    """A new trainer of a new broker is obeyed, though it begins at the first epoch; neither knows
    which numbers the earlier broker gave last, so some are left out."""
    scene = Scene(1)
    for count in range(3):
        scene.trainer.leave()
        scene.trainer = scene.world.add_trainer(f"t{count}")
        assert scene.world.run_until(lambda: scene.trainer.is_joined)
        scene.update(count + 1)
        assert scene.settled().version == count + 1
    scene.world.run_for(2000.0)
    scene.trainer.kill()
    scene.world.restart_broker()
    scene.trainer = scene.world.add_trainer("new")
    assert scene.world.run_until(lambda: scene.trainer.is_joined and scene.world.has_joined())
    scene.update(9)
    version = scene.settled().version
    assert version > 4
    scene.update(10)
    assert scene.settled().version == version + 1


def test_no_number_is_given_to_two_sets_of_weights() -> None:
    """One engine commits alone and gets out of reach; another broker and trainer, who can't know
    that, update the other one. When the first is back, it is behind."""
    scene = Scene(1, 1)
    e0, e1 = scene.engine("e0"), scene.engine("e1")
    scene.update(1)
    assert scene.settled().version == 1
    world = scene.world
    world.network.cut(e0.route)
    assert world.run_until(lambda: "e0" not in world.existing_group.registry.engines)
    scene.update(2)
    assert world.run_until(lambda: e1.truth.version == 2 and not scene.trainer.is_busy)
    world.network.cut(e1.route)
    scene.trainer.kill()
    world.restart_broker()
    world.network.heal(e0.route)
    scene.trainer = world.add_trainer("new")
    assert world.run_until(lambda: scene.trainer.is_joined and world.has_joined(["e0"]))
    scene.update(3)
    assert world.run_until(lambda: e0.truth.version > 1 and not scene.trainer.is_busy)
    assert e0.truth.version > 2
    scene.world.network.heal(e1.route)
    scene.update(4)
    scene.settled()
    scene.watch.check_versions()


def test_a_broker_that_restarts_loses_nothing() -> None:
    """Generation goes on, engines join again with what they serve, and updates go on."""
    scene = Scene(2, 1)
    scene.update()
    assert scene.settled().version == 1
    scene.world.restart_broker()
    assert scene.world.group is None
    assert scene.running() == {"e0", "e1", "e2"}
    assert scene.world.run_until(lambda: scene.trainer.is_joined and scene.world.has_joined())
    assert scene.world.existing_group.version == 1
    scene.update(8)
    assert scene.settled().version == 2


def test_a_pause_lasts_as_long_as_its_trainer_lives() -> None:
    """Every heartbeat's answer renews the lease, many times over."""
    scene = Scene(2, 1)
    scene.trainer.run(scene.trainer.pause(hold_ms=70_000.0))
    scene.until(PauseState.PAUSED)
    scene.world.run_for(60_000.0)
    assert scene.running() == set()
    assert not any(engine.lease_ran_out for engine in scene.world.live_engines)


def test_an_engine_does_not_wait_longer_than_its_lease_for_another_that_is_undone() -> None:
    """The trainer is gone, and nobody renews: who has nothing to undo goes on."""
    scene = Scene(1, 1)
    scene.engine("e0").behaviour.hold.add(Restore)
    scene.update()
    scene.engine("e0").behaviour.hold.add(ReceiveChunk)
    scene.until(UpdateState.LOADING)
    scene.trainer.kill()
    assert scene.world.run_until(lambda: scene.running() == {"e1"}, within_ms=12_000.0)
    assert scene.engine("e1").lease_ran_out
    scene.engine("e0").release(Restore)
    scene.rest()
    assert scene.running() == {"e0", "e1"}


def test_engines_paused_when_the_broker_dies_resume_by_their_lease() -> None:
    """Nobody is there to tell them."""
    scene = Scene(2)
    scene.pause()
    scene.until(PauseState.PAUSED)
    scene.world.broker.close()
    scene.world.run_for(5000.0)
    assert scene.running() == set()
    scene.world.run_for(2000.0)
    assert scene.running() == {"e0", "e1"}
    assert all(engine.lease_ran_out for engine in scene.world.live_engines)


def test_an_engine_that_loaded_a_part_when_the_broker_dies_is_quarantined() -> None:
    """Its lease ends, and it still does not serve mixed weights."""
    scene = Scene(1)
    scene.update()
    assert scene.world.run_until(lambda: scene.engine("e0").truth.loaded == [0])
    scene.world.broker.close()
    scene.world.run_for(8000.0)
    assert scene.engine("e0").session.phase == "quarantined"
    assert scene.running() == set()


def test_strays_are_brought_back_after_the_broker_restarts() -> None:
    """Paused, armed or in the middle of an update: the new broker knows of none of it."""
    for state in (PauseState.PAUSED, UpdateState.ARMED, UpdateState.LOADING):
        scene = Scene(1, 1)
        scene.trainer.run(scene.trainer.update(5, think_ms=200.0))
        scene.until(state)
        scene.trainer.kill()
        scene.world.restart_broker()
        assert scene.world.settle(within_ms=10_000.0), state
        scene.watch.check_end()
        assert scene.running() == {"e0", "e1"}, state


def test_commands_asked_again_over_a_bad_network_are_done_once() -> None:
    """Half the frames are lost, many doubled; the engines were called once for each step."""
    scene = Scene(1, 1)
    scene.world.network.faults = Faults(drop=0.3, duplicate=0.3, delay_ms=1.0, jitter_ms=30.0)
    scene.update()
    assert scene.settled().version == 1
    kinds = Counter(type(call) for call in scene.engine("e0").calls)
    assert kinds[CallPause] == kinds[CallResume] == kinds[CallCommit] == 1
    assert kinds[LoadChunk] == 4
    assert any(request.sent > 1 for request in scene.trainer.requests)


def test_waiting_for_engines_and_forged_epochs() -> None:
    """An older epoch is refused by name, whatever state the group is in."""
    scene = Scene(1)
    scene.pause()
    scene.until(PauseState.PAUSED)
    peer = scene.trainer.peer
    for message in (Resume(scene.world.existing_group.pause.update_id), Commit("u1", 1, "", ())):
        peer._transmit(message, peer.new_id(), 0, scene.world.existing_group.epoch - 1)
    scene.world.run_for(5.0)
    assert scene.trainer.nacks[NackCode.FENCED] == 2
    assert scene.world.existing_group.pause.state is PauseState.PAUSED
    assert scene.settled().error is None


def test_waiting_for_more_engines_than_come_ends_in_time() -> None:
    """With a refusal that says how many there were."""
    scene = Scene(1)
    assert scene.refused(WaitEngines(3, 500)) is NackCode.TIMEOUT
    nack = scene.trainer.requests[-1].answer
    assert isinstance(nack, Nack)
    assert "1 of 3" in nack.detail
    assert scene.world.group is not None
    assert scene.world.group.name == GROUP


def test_a_pause_that_is_recovered_frees_no_quarantined_dp_group() -> None:
    """Its whole rank stays paused with the one that holds a part."""
    scene = Scene(2, 1, 1)
    scene.engine("e0").behaviour.fail_next.add(LoadChunk)
    scene.update()
    scene.rest()
    assert scene.running() == {"e2", "e3"}
    scene.engine("e3").behaviour.fail_next.add(CallPause)
    scene.pause()
    assert isinstance(scene.settled().error, PauseFailed)
    assert scene.running() == {"e2", "e3"}


def test_peers_of_a_rank_that_fell_out_of_a_pause_stay_out_with_it() -> None:
    """It is back before the update begins: none of its DP group takes part, so that none
    serves another version than its peer ranks."""
    scene = Scene(2, 1)
    ask = PauseLocal("p1", "keep", True, 6000, 60_000, 0, "keep")
    scene.trainer.run(scene.trainer.ask(ask))
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    held = scene.world.existing_group
    scene.world.network.cut(scene.engine("e1").route)
    assert scene.world.run_until(lambda: "e1" not in held.registry.engines)
    scene.world.network.heal(scene.engine("e1").route)
    assert scene.world.run_until(lambda: "e1" in held.registry.engines)
    assert held.pause.state is not PauseState.RUNNING
    assert held.registry.ready() == ["e2"]
    scene.trainer.run(scene.trainer.ask(Resume("p1")))
    scene.rest()
    assert held.registry.ready() == ["e0", "e1", "e2"]


def test_an_engine_whose_pause_failed_is_paused_again_and_resumed() -> None:
    """It may have been paused all the same; nobody else would ever resume it."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(CallPause)
    scene.pause()
    assert code_of(scene.settled()) is NackCode.ENGINE_FAILED
    calls = [type(c) for c in scene.engine("e1").calls if isinstance(c, CallPause | CallResume)]
    assert calls == [CallPause, CallPause, CallResume]
    assert scene.running() == {"e0", "e1"}


def test_a_new_broker_resumes_no_rank_while_its_peer_gives_the_update_up() -> None:
    """It finds one restored and paused, and the other one in the middle of its restore."""
    scene = Scene(2)
    scene.engine("e0").behaviour.hold.add(Restore)
    scene.update()
    scene.until(UpdateState.LOADING)
    scene.trainer.kill()
    scene.world.restart_broker()
    waits, restores = scene.engine("e1"), scene.engine("e0")
    assert scene.world.run_until(lambda: isinstance(restores.running_call, Restore))
    assert scene.world.run_until(lambda: waits.session.phase == "paused")
    scene.world.run_for(2000.0)
    assert scene.running() == set()
    restores.release(Restore)
    scene.rest()
    assert scene.running() == {"e0", "e1"}


def test_a_manifest_that_is_being_checked_is_asked_again_by_its_digest() -> None:
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.hold.add(ArmManifest)
    scene.update()

    def arms() -> list[Arm]:
        return [each for each in scene.engine("e1").commands if isinstance(each, Arm)]

    assert scene.world.run_until(lambda: len(arms()) >= 3, within_ms=10_000.0)
    assert [bool(arm.names) for arm in arms()] == [True] + [False] * (len(arms()) - 1)
    assert len({arm.digest for arm in arms()}) == 1
    scene.engine("e1").release(ArmManifest)
    assert scene.settled().version == 1


def test_an_engine_that_never_got_the_manifest_gets_it_after_all() -> None:
    """It knows no such digest, says so, and the update goes on with all."""
    scene = Scene(1, 1)
    lossy = scene.engine("e1")
    take = lossy._on_message
    lost: list[Arm] = []

    def lose_the_first_arm(envelope: Envelope, message: Message) -> None:
        if isinstance(message, Arm) and not lost:
            lost.append(message)
        else:
            take(envelope, message)

    lossy.peer._on_message = lose_the_first_arm
    scene.update()
    outcome = scene.settled()
    assert (outcome.version, outcome.excluded) == (1, ())
    arms = [each for each in lossy.commands if isinstance(each, Arm)]
    assert [bool(arm.names) for arm in [*lost, *arms]] == [True, False, True]


def arms_of(engine: SimEngine) -> list[bool]:
    """The ARMs that came to an engine: whether each had the tensors."""
    return [bool(each.names) for each in engine.commands if isinstance(each, Arm)]


def test_a_manifest_that_was_armed_before_comes_by_its_digest_alone() -> None:
    """Engines that have restarted get the tensors before any request is repeated. Then the trainer
    opens its transport again, since they lack that, too, and arms the update again."""
    scene = Scene(1, 1, 1)
    scene.update(7)
    assert scene.settled().version == 1
    scene.world.restart_engine("e1")
    scene.world.restart_engine("e2")
    assert scene.world.run_until(scene.world.has_joined)
    began_ms = scene.world.now_ms
    scene.update(8)
    scene.until(UpdateState.ARMED)
    assert scene.world.now_ms - began_ms < FAST_BROKER.retry_ms
    assert scene.settled().version == 2
    assert arms_of(scene.engine("e0")) == [True, False, False]
    assert arms_of(scene.engine("e1")) == arms_of(scene.engine("e2")) == [False, True, False]


def test_a_broker_that_has_restarted_learns_a_manifest_again() -> None:
    scene = Scene(1)
    scene.update(7)
    assert scene.settled().version == 1
    scene.world.restart_broker()
    assert scene.world.run_until(lambda: scene.world.has_joined() and scene.trainer.is_joined)
    scene.update(8)
    assert scene.settled().version > 1
    assert scene.trainer.nacks[NackCode.MANIFEST_UNKNOWN] == 1
    assert arms_of(scene.engine("e0")) == [True, True]


def test_an_engine_that_refuses_any_digest_gets_the_tensors_as_a_repetition() -> None:
    """Else its refusals would make the broker send without end, and fill the journal."""
    scene = Scene(1, 1)
    engine = scene.engine("e1")
    take = engine._on_message
    arms: list[Arm] = []

    def refuse(envelope: Envelope, message: Message) -> None:
        if isinstance(message, Arm):
            arms.append(message)
            unknown = NackCode.MANIFEST_UNKNOWN
            nack = make_nack(unknown, step="arm", update_id=message.update_id)
            engine.peer.send(nack, reply_to=envelope.id)
        else:
            take(envelope, message)

    engine.peer._on_message = refuse
    scene.update()
    scene.until(UpdateState.ARMING)
    scene.world.run_for(10 * FAST_BROKER.retry_ms)
    assert 10 <= sum(bool(arm.names) for arm in arms) <= 12


def test_an_opening_that_is_made_again_is_no_failure_of_an_update() -> None:
    """An engine leaves while a collective is opened, and comes back: the trainer opens another."""
    scene = Scene(1, 1)
    scene.trainer.collective = True
    scene.engine("e1").behaviour.hold.add(Open)
    scene.update()
    scene.until(UpdateState.OPENING)
    group = scene.world.existing_group
    peer = group.registry.engines["e1"]
    notes = [each for each in group.on_gone(peer, "gone", 1.0) if isinstance(each, Note)]
    assert [(note.event, note.level) for note in notes] == [("transfer_closed", "info")]
