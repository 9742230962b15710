"""A group that sleeps, in simulated time: who may ask, and what becomes of it when it fails."""

from __future__ import annotations

import pytest

from bus._protocol.engine.calls import CallCommit, CallResume, CallSleep, CallWakeWeights
from bus._protocol.group.sleep import SleepState
from bus._protocol.group.update import UpdateState
from bus.messages import NackCode, PauseLocal, Resume, Sleep, SleepLevel, Wake
from bus.operations import LoadChunk, Restore, Start
from tests.sim.makers import make_arm, make_manifest
from tests.unit.bus._builders import facts
from tests.unit.bus._scene import Scene, code_of


def nap(scene: Scene, level: SleepLevel, payload: int = 0) -> None:
    scene.trainer.run(scene.trainer.sleep(level, payload=payload, hold_ms=200.0))


def paused(scene: Scene, *, clear_cache: bool = True) -> str:
    """The trainer's own pause, held."""
    ask = PauseLocal("p1", "keep", clear_cache, 6000, 60_000, 0, "keep")
    scene.trainer.run(scene.trainer.ask(ask))
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    return "p1"


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_of_a_group_that_sleeps(level: SleepLevel) -> None:
    """Everybody slept once, woke once, and serves the new weights."""
    scene = Scene(2, 1)
    nap(scene, level, payload=7)
    outcome = scene.settled()
    assert (outcome.error, outcome.version) == (None, 1)
    for engine in scene.world.live_engines:
        assert [c for c in engine.calls if isinstance(c, CallSleep)] == [CallSleep(level)]
        assert [c for c in engine.calls if isinstance(c, CallResume)] == [CallResume(asleep=True)]
        assert set(engine.truth.weights.values()) == {7}


def test_a_sleep_in_a_pause_that_keeps_caches_drops_them() -> None:
    scene = Scene(2, 1)
    pause_id = paused(scene, clear_cache=False)
    scene.trainer.run(scene.trainer.ask(Sleep(pause_id, 1)))
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    assert scene.trainer.outcomes[-1].error is None
    for engine in scene.world.live_engines:
        assert engine.calls[-1] == CallSleep(1, clears=True)


def test_a_sleep_of_level_1_keeps_the_weights() -> None:
    """Without an update, the old ones serve on."""
    scene = Scene(2, 1)
    nap(scene, 1)
    assert scene.settled().error is None
    assert scene.versions() == {"e0": 0, "e1": 0, "e2": 0}
    assert scene.running() == {"e0", "e1", "e2"}


def test_without_an_update_the_emptied_are_quarantined() -> None:
    """No RESUME is sent to them, the trainer hears why, and the next update frees them."""
    scene = Scene(2, 1)
    nap(scene, 2)
    outcome = scene.settled()
    assert code_of(outcome) is NackCode.EMPTY_GROUP
    assert scene.running() == set()
    assert not [c for e in scene.world.live_engines for c in e.commands if isinstance(c, Resume)]
    assert set(scene.world.existing_group.registry.quarantined) == {"e0", "e1", "e2"}
    scene.update(9)
    assert scene.settled().version == 1
    assert scene.running() == {"e0", "e1", "e2"}


def test_a_trainer_that_dies_leaves_sleepers_to_be_woken() -> None:
    """At level 1 they serve the old weights."""
    scene = Scene(2, 1)
    nap(scene, 1)
    scene.until(SleepState.ASLEEP)
    scene.trainer.kill()
    scene.rest()
    assert scene.running() == {"e0", "e1", "e2"}


def test_a_trainer_that_dies_leaves_the_emptied_quarantined() -> None:
    """Until another one brings weights."""
    scene = Scene(2, 1)
    nap(scene, 2)
    scene.until(SleepState.ASLEEP)
    scene.trainer.kill()
    scene.rest()
    assert scene.running() == set()
    scene.trainer = scene.world.add_trainer("next")
    assert scene.world.run_until(lambda: scene.trainer.is_joined)
    scene.update(9)
    assert scene.settled().version == 1
    assert scene.running() == {"e0", "e1", "e2"}


@pytest.mark.parametrize("level", [1, 2])
def test_a_broker_that_dies_meanwhile(level: SleepLevel) -> None:
    """The next one wakes sleepers, and takes the emptied for quarantined."""
    scene = Scene(2, 1)
    nap(scene, level)
    scene.until(SleepState.ASLEEP)
    scene.world.restart_broker()
    scene.rest()
    assert scene.running() == ({"e0", "e1", "e2"} if level == 1 else set())
    if level == 2:
        assert {e.session.phase for e in scene.world.live_engines} == {"quarantined"}


def test_one_that_refuses_to_sleep_is_named_and_all_wake() -> None:
    """What sleeps by then, wakes with the resume."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(CallSleep)
    nap(scene, 1)
    outcome = scene.settled()
    assert code_of(outcome) is NackCode.ENGINE_FAILED
    assert scene.running() == {"e0", "e1"}


def test_one_whose_weights_do_not_wake_is_named() -> None:
    """Nothing was armed; all resume with the weights they had."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(CallWakeWeights)
    nap(scene, 1, payload=7)
    assert code_of(scene.settled()) is NackCode.ENGINE_FAILED
    assert scene.running() == {"e0", "e1"}
    assert scene.versions() == {"e0": 0, "e1": 0}


def test_sleep_and_wake_need_a_pause() -> None:
    """Of the name that is given; nobody is asked."""
    scene = Scene(1)
    assert scene.refused(Sleep("p1", 1)) is NackCode.WRONG_STATE
    assert scene.refused(Wake("p1")) is NackCode.WRONG_STATE
    paused(scene)
    assert scene.refused(Sleep("p2", 1)) is NackCode.WRONG_STATE
    assert not [c for c in scene.engine("e0").commands if isinstance(c, Sleep | Wake)]


def test_a_group_that_sleeps_is_not_armed() -> None:
    """It is refused before any engine is asked."""
    scene = Scene(1)
    pause_id = paused(scene)
    scene.trainer.run(scene.trainer.ask(Sleep(pause_id, 1)))
    scene.until(SleepState.ASLEEP)
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    assert scene.refused(make_arm("u1", make_manifest())) is NackCode.ENGINE_ASLEEP
    assert scene.refused(Sleep(pause_id, 1)) is NackCode.WRONG_STATE


def test_an_engine_that_can_not_sleep_keeps_all_awake() -> None:
    """It says so when it joins; the refusal names it, and nobody is asked."""
    scene = Scene(1, 1)
    peer = scene.world.existing_group.registry.engines["e1"]
    peer.facts = facts(dp_group="e1", can_sleep=False)
    pause_id = paused(scene)
    scene.trainer.run(scene.trainer.ask(Sleep(pause_id, 1)))
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    error = scene.trainer.outcomes[-1].error
    assert "e1 can't sleep" in str(error)
    assert not [c for e in scene.world.live_engines for c in e.calls if isinstance(c, CallSleep)]


def test_an_update_that_is_armed_again_keeps_its_version() -> None:
    """One that was refused may have armed an engine for it."""
    scene = Scene(1)
    manifest = make_manifest()
    for update_id in ("u1", "u1", "u2"):
        code = scene.refused(make_arm(update_id, manifest))  # no transport is open
        assert code is NackCode.TRANSFER_CLOSED
    versions = {
        (each.update_id, each.version)
        for each in scene.engine("e0").commands
        if type(each) is type(make_arm("u", manifest))
    }
    assert versions == {("u1", 1), ("u2", 2)}


def test_a_sleep_after_one_in_which_the_update_failed() -> None:
    """The same level or the other: what the last one left behind, the next takes over."""
    for level in (1, 2):
        scene = Scene(1, 1)
        scene.engine("e1").behaviour.fail_next.add(LoadChunk)
        nap(scene, 2, payload=7)
        scene.settled()
        assert "e1" in scene.world.existing_group.registry.quarantined
        nap(scene, level, payload=8)
        assert scene.settled().error is None
        assert scene.running() == {"e0", "e1"}
        for engine in scene.world.live_engines:
            assert set(engine.truth.weights.values()) == {8}


def test_the_next_broker_knows_the_emptied_from_when_they_join() -> None:
    """A resume is not asked of them, however soon it comes; the trainer hears why."""
    scene = Scene(2)
    pause_id = paused(scene)
    scene.trainer.run(scene.trainer.ask(Sleep(pause_id, 2)))
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    scene.world.restart_broker()
    assert scene.world.run_until(lambda: scene.trainer.is_joined and scene.world.has_joined())
    scene.trainer.run(scene.trainer.pause(hold_ms=0.0))
    assert scene.world.run_until(lambda: not scene.trainer.is_busy, within_ms=3000.0)
    assert code_of(scene.trainer.outcomes[-1]) is NackCode.EMPTY_GROUP


@pytest.mark.parametrize("state", ["committing", "aborting"])
def test_a_resume_that_comes_while_an_update_ends_follows_it(state: str) -> None:
    """A trainer that was cancelled asks once; nobody is left paused."""
    scene = Scene(1, 1)
    if state == "aborting":
        scene.engine("e1").behaviour.fail_next.add(Start)
        scene.engine("e0").behaviour.slow_ms[Restore] = 500.0
    else:
        scene.engine("e0").behaviour.slow_ms[CallCommit] = 500.0
    scene.update()
    scene.until(UpdateState(state))
    scene.trainer.cancel()
    scene.trainer.run(scene.trainer.ask(Resume(scene.world.existing_group.pause.update_id)))
    scene.rest()
    assert scene.trainer.outcomes[-1].error is None
    assert "e0" in scene.running()


def test_a_wake_that_is_asked_again_is_the_one_under_way() -> None:
    """Whoever was cancelled while the weights woke may go on in the same pause."""
    scene = Scene(1, 1)
    pause_id = paused(scene)
    scene.trainer.run(scene.trainer.ask(Sleep(pause_id, 1)))
    assert scene.world.run_until(lambda: not scene.trainer.is_busy)
    scene.engine("e0").behaviour.slow_ms[CallWakeWeights] = 500.0
    scene.trainer.run(scene.trainer.ask(Wake(pause_id)))
    scene.until(SleepState.WAKING)
    scene.trainer.cancel()
    for message in (Wake(pause_id), Resume(pause_id)):
        scene.trainer.run(scene.trainer.ask(message))
        assert scene.world.run_until(lambda: not scene.trainer.is_busy)
        assert scene.trainer.outcomes[-1].error is None
    scene.rest()
    for engine in scene.world.live_engines:
        assert [c for c in engine.calls if isinstance(c, CallWakeWeights)] == [CallWakeWeights()]
    assert scene.running() == {"e0", "e1"}


def test_one_that_does_not_wake_with_the_resume_is_asked_again() -> None:
    """The others run meanwhile, and the trainer's block has ended."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(CallResume)
    nap(scene, 1)
    assert scene.settled().error is None
    calls = [c for c in scene.engine("e1").calls if isinstance(c, CallResume)]
    assert calls == [CallResume(asleep=True)] * 2
    assert scene.running() == {"e0", "e1"}


def test_the_only_one_that_does_not_wake_says_why() -> None:
    """With its own words, and it is asked again."""
    scene = Scene(1)
    scene.engine("e0").behaviour.fail_next.add(CallResume)
    nap(scene, 1)
    assert code_of(scene.settled()) is NackCode.ENGINE_FAILED
    assert scene.running() == {"e0"}
