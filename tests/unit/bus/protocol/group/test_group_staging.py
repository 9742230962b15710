"""A whole group in simulated time, whose updates are staged: nobody stops, nobody mixes."""

from __future__ import annotations

import pytest

from bus._protocol.engine.calls import CallPause, CallResume
from bus._protocol.group.pause import PauseState
from bus._protocol.group.update import UpdateState
from bus.messages import (
    Commit,
    GroupAck,
    NackCode,
    PauseLocal,
    Staging,
    Step,
    TransferInit,
    UpdateStart,
)
from bus.operations import (
    ArmManifest,
    Finish,
    LoadChunk,
    ReceiveChunk,
    Start,
    SwapStaged,
)
from tests.sim.makers import make_arm, make_manifest
from tests.unit.bus._scene import Scene, code_of

STAGING = Staging(required=False, budget_bytes=0, keep=False, clear_cache=False)
BEFORE_THE_SWAP = (
    UpdateState.ARMING,
    UpdateState.ARMED,
    UpdateState.STARTING,
    UpdateState.LOADING,
    UpdateState.FINISHING,
    UpdateState.FINISHED,
)


def staged(*sizes: int) -> Scene:
    """With a trainer that would have its updates staged."""
    scene = Scene(*sizes)
    scene.trainer.staging = STAGING
    return scene


def calls(scene: Scene) -> set[type]:
    return {type(call) for engine in scene.world.engines.values() for call in engine.calls}


def test_an_update_reaches_everybody_and_nobody_is_paused() -> None:
    """Engines alone and ranks in lockstep; then another one."""
    scene = staged(1, 2, 3)
    for payload in (7, 8):
        scene.update(payload)
        outcome = scene.settled()
        assert (outcome.what, outcome.excluded) == ("staged", ())
        assert set(scene.versions().values()) == {payload - 6}
    assert not calls(scene) & {CallPause, CallResume}
    assert scene.reach["engine committed"] == 12


@pytest.mark.parametrize("state", BEFORE_THE_SWAP)
@pytest.mark.parametrize("how", ["killed", "leaves", "silent"])
def test_a_trainer_lost_before_the_swap_leaves_all_as_they_were(
    state: UpdateState, how: str
) -> None:
    """They run all the time, and the next update goes as ever."""
    scene = staged(1, 2)
    scene.update()
    scene.until(state)
    match how:
        case "killed":
            scene.trainer.kill()
        case "leaves":
            scene.trainer.leave()
        case _:
            scene.world.network.cut(scene.trainer.route)
            scene.world.run_for(10_000.0)
            scene.trainer.kill()
    scene.rest()
    assert set(scene.versions().values()) == {0}
    assert scene.running() == {"e0", "e1", "e2"}
    assert scene.reach["quarantined at the end"] == 0
    scene.trainer = scene.world.add_trainer("second")
    scene.trainer.staging = STAGING
    assert scene.world.run_until(lambda: scene.trainer.is_joined)
    scene.update(9)
    assert scene.settled().version > 0


def test_nobody_waits_long_for_a_silent_engine_that_has_an_update_to_undo() -> None:
    """It is left out before it counts as lost, undoes the update once it is heard, and is back."""
    scene = staged(1, 1)
    scene.update()
    scene.until(UpdateState.LOADING)
    scene.world.network.cut(scene.engine("e0").route)
    scene.trainer.leave()
    scene.until(UpdateState.IDLE)
    engines = scene.world.existing_group.registry.engines
    assert engines["e0"].overdue == Step.ABORT.value
    scene.world.network.heal(scene.engine("e0").route)
    scene.trainer = scene.world.add_trainer("second")
    assert scene.world.run_until(lambda: scene.trainer.is_joined and not engines["e0"].overdue)
    scene.update(9)
    assert (scene.settled().excluded, set(scene.versions().values())) == ((), {2})


@pytest.mark.parametrize("kind", [Start, ReceiveChunk, LoadChunk, Finish])
def test_a_step_that_fails_somewhere_changes_nothing_there(kind: type) -> None:
    """Without it, the others go on to the new version; it is behind, and catches up."""
    scene = staged(1, 2)
    scene.engine("e0").behaviour.fail_next.add(kind)
    scene.update()
    group = scene.world.existing_group
    assert scene.world.run_until(
        lambda: "e0" in group.update.excluded or group.update.failure is not None
    )
    assert not group.registry.quarantined
    outcome = scene.settled()
    assert scene.engine("e0").truth.version == 0
    assert not scene.engine("e0").session.update.partial
    if kind is Start:  # nothing was sent yet: it is given up everywhere
        assert code_of(outcome) is NackCode.ENGINE_FAILED
        assert set(scene.versions().values()) == {0}
    else:
        assert outcome.excluded == ("e0",)
        assert scene.engine("e1").truth.version == scene.engine("e2").truth.version == 1
        scene.world.run_for(2.0 * scene.world.config.heartbeat_ms)  # it hears of that
        assert scene.engine("e0").truth.closed
    scene.update(9)
    assert scene.settled().excluded == ()
    assert len(set(scene.versions().values())) == 1
    assert not scene.engine("e0").truth.closed


def test_a_rank_that_can_not_swap_keeps_its_peers_from_it() -> None:
    """It vetoes, and all ranks of its DP group stay at the old version; others commit."""
    scene = staged(1, 2)
    scene.engine("e2").behaviour.fail_next.add(SwapStaged)
    scene.update()
    outcome = scene.settled()
    assert set(outcome.excluded) == {"e1", "e2"}
    assert scene.versions() == {"e0": 1, "e1": 0, "e2": 0}
    alone = staged(2)
    alone.engine("e1").behaviour.fail_next.add(SwapStaged)
    alone.update()
    assert code_of(alone.settled()) is NackCode.CALLED_OFF
    assert alone.versions() == {"e0": 0, "e1": 0}
    assert alone.running() == {"e0", "e1"}


def test_a_commit_that_reaches_one_rank_alone_commits_nobody() -> None:
    """The broker dies between the two; whoever heard waits at a step, and generates meanwhile."""
    scene = staged(2)
    scene.update()
    scene.until(UpdateState.FINISHED)
    scene.world.network.cut(scene.engine("e1").route, up=False, down=True)
    scene.until(UpdateState.COMMITTING)
    assert scene.world.run_until(lambda: isinstance(scene.engine("e0").running_call, SwapStaged))
    scene.world.kill_broker()
    scene.world.run_for(5_000.0)
    assert scene.engine("e0").truth.running
    assert scene.versions() == {"e0": 0, "e1": 0}
    scene.world.network.heal(scene.engine("e1").route)
    scene.world.start_broker()
    scene.rest()
    assert len(set(scene.versions().values())) == 1
    assert scene.running() == {"e0", "e1"}


def test_a_rank_that_dies_between_the_decision_and_its_ack() -> None:
    """Its DP group serves one version, whichever: that which all ranks have swapped to."""
    scene = staged(2, 1)
    engine = scene.engine("e0")
    scene.update()
    assert scene.world.run_until(lambda: engine.swapped)
    engine.kill()
    scene.watch.lost_ranks.add("dp0")
    scene.rest()
    assert scene.engine("e1").truth.version == scene.engine("e2").truth.version == 1


def test_who_has_no_room_has_all_updated_in_a_pause() -> None:
    """And is named. If it must be staged, it is refused instead."""
    scene = staged(1, 1)
    scene.engine("e1").behaviour.stages = False
    told: list[GroupAck] = []
    scene.trainer.on_answer = lambda answer: (
        told.append(answer) if isinstance(answer, GroupAck) else None
    )
    scene.update()
    outcome = scene.settled()
    assert (outcome.what, outcome.version) == ("update", 1)
    assert [ack.why_paused for ack in told if ack.why_paused] == ["e1: no room"]
    assert CallPause in calls(scene)


def test_in_a_pause_nothing_is_staged() -> None:
    """It is said when it is armed, before any engine is asked; or refused."""
    scene = staged(1)
    manifest = make_manifest()
    scene.trainer.run(
        scene.trainer.ask(
            PauseLocal("p1", "keep", True, 6000, 60_000, 0, "keep"),
            TransferInit("t1", "sim", b"x", 0, 0, {}),
        )
    )
    scene.until(PauseState.PAUSED)
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    must = Staging(required=True, budget_bytes=0, keep=False, clear_cache=False)
    assert scene.refused(make_arm("u1", manifest, staging=must)) is NackCode.STAGING_REFUSED
    told: list[GroupAck] = []
    scene.trainer.on_answer = lambda answer: (
        told.append(answer) if isinstance(answer, GroupAck) else None
    )
    scene.trainer.run(scene.trainer.ask(make_arm("u1", manifest, staging=STAGING)))
    assert scene.world.run_until(lambda: bool(told))
    assert told[0].why_paused == "the group is paused"
    armed = [call for call in scene.engine("e0").calls if isinstance(call, ArmManifest)]
    assert [call.staging for call in armed] == [None]
    assert scene.refused(UpdateStart("u1", staged=True)) is NackCode.STAGING_REFUSED


def test_a_commit_waits_for_the_end_of_a_pause() -> None:
    """Somebody has paused the group since it was armed: it swaps when it runs again."""
    scene = staged(2)
    scene.update()
    scene.until(UpdateState.FINISHED)
    group = scene.world.existing_group
    scene.trainer.cancel()
    scene.trainer.run(scene.trainer.ask(PauseLocal("p1", "keep", True, 6000, 60_000, 0, "keep")))
    scene.until(PauseState.PAUSED)
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    commit = Commit(group.update.update_id, group.update.version, "p7", ())
    scene.trainer.run(scene.trainer.ask(commit))
    scene.world.run_for(500.0)
    assert group.update.state is UpdateState.FINISHED
    assert scene.versions() == {"e0": 0, "e1": 0}
    scene.trainer.kill()
    scene.rest()
    assert scene.running() == {"e0", "e1"}
