"""Engines that are behind catch up alone: with the group's own version, while the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from bus._protocol.engine.calls import CallCommit
from bus._protocol.group.catch_up import GroupVersion
from bus._protocol.group.engine_registry import EngineRegistry
from bus._protocol.group.update import UpdateState
from bus.messages import (
    Ack,
    Arm,
    Message,
    NackCode,
    PauseLocal,
    PlanTransfer,
    StaleEngines,
    Step,
    TransferInit,
)
from bus.operations import LoadChunk, Start
from tests.sim.makers import make_arm, make_manifest
from tests.unit.bus._builders import facts, peer
from tests.unit.bus._scene import Scene, code_of
from tests.unit.bus.protocol.group.test_group_staging import STAGING

if TYPE_CHECKING:
    from bus._protocol.core.membership import Peer
    from tests.sim.engine import SimEngine

MANIFEST = make_manifest()


def keeping(*sizes: int, draft: bool = False, collective: bool = False) -> Scene:
    """Engines of such DP groups, at version 1, of which the trainer keeps the weights (named 7)."""
    scene = Scene(*sizes, draft=draft)
    scene.trainer.keep_last = True
    scene.trainer.collective = collective
    scene.update(7)
    assert scene.settled().version == 1
    return scene


def caught_up(scene: Scene, *names: str) -> None:
    """Wait until these serve the group's version, and all is at rest."""

    def whole() -> bool:
        engines = [scene.engine(name) for name in names]
        return all(not each.session.is_stale and each.truth.version == 1 for each in engines)

    assert scene.world.run_until(whole), [each.session.phase for each in scene.world.live_engines]
    scene.rest()
    for name in names:
        assert set(scene.engine(name).truth.weights.values()) == {7}
        assert scene.engine(name).truth.running
    assert scene.world.existing_group.version == 1


def untouched(engine: SimEngine) -> None:
    """It was paused once, for the first update, and asked for nothing of another."""
    assert (engine.truth.pauses, engine.truth.commits) == (1, [1])
    asked = [each for each in engine.commands if isinstance(each, PauseLocal | TransferInit | Arm)]
    assert len(asked) == 3


@pytest.mark.parametrize("collective", [False, True])
def test_a_late_joiner_is_brought_to_the_groups_version(collective: bool) -> None:
    """No other version is given, and nobody else is asked for anything."""
    scene = keeping(1, 1, collective=collective)
    late = scene.world.add_engine("e2")
    assert scene.world.run_until(lambda: late.is_joined)
    assert late.session.is_stale
    caught_up(scene, "e2")
    for name in ("e0", "e1"):
        untouched(scene.engine(name))
    assert [each.version for each in scene.trainer.catch_ups] == [1]
    if collective:
        assert late.truth.transfer is not None
        assert late.truth.transfer.world_size == 2
    scene.update(8)
    assert scene.settled().version == 2
    assert scene.versions() == {"e0": 2, "e1": 2, "e2": 2}


def test_a_restarted_engine_is_brought_to_the_groups_version() -> None:
    scene = keeping(1, 1)
    scene.world.restart_engine("e1")
    caught_up(scene, "e1")
    untouched(scene.engine("e0"))


def test_one_that_an_update_has_left_behind_comes_to_its_version() -> None:
    """It loaded a part; the others serve the version that it is brought to."""
    scene = Scene(1, 1)
    scene.trainer.keep_last = True
    scene.engine("e1").behaviour.fail_next.add(LoadChunk)
    scene.update(7)
    assert scene.settled().excluded == ("e1",)
    assert scene.engine("e1").session.is_stale
    caught_up(scene, "e1")
    untouched(scene.engine("e0"))


def test_all_come_back_to_the_version_before_an_update_that_failed_everywhere() -> None:
    """Nobody serves any more; the version that was the group's is what they get again."""
    scene = keeping(1, 1)
    for name in ("e0", "e1"):
        scene.engine(name).behaviour.fail_next.add(LoadChunk)
    scene.update(8)
    assert scene.settled().error is not None
    assert scene.running() == set()
    caught_up(scene, "e0", "e1")
    assert scene.engine("e0").truth.commits == [1, 1]


def test_one_whose_commit_failed_takes_the_peer_that_has_committed_along() -> None:
    """A DP group runs as one: the rank that serves the version loads it again."""
    scene = Scene(2, 1)
    scene.trainer.keep_last = True
    scene.engine("e1").behaviour.fail_next.add(CallCommit)
    scene.update(7)
    outcome = scene.settled()
    assert set(outcome.excluded) == {"e0", "e1"}
    assert scene.engine("e0").truth.commits == [1]
    caught_up(scene, "e0", "e1")
    untouched(scene.engine("e2"))


def test_a_rank_that_has_committed_alone_goes_back_to_the_groups_version() -> None:
    """Its peer rank's commit failed, and nobody else was left: so the update has failed."""
    scene = keeping(2, 1)
    scene.engine("e1").behaviour.fail_next.add(CallCommit)
    scene.engine("e2").behaviour.fail_next.add(LoadChunk)
    scene.update(8)
    assert scene.settled().error is not None
    assert scene.engine("e0").truth.commits == [1, 2]
    caught_up(scene, "e0", "e1", "e2")
    assert scene.engine("e0").truth.commits == [1, 2, 1]
    scene.update(9)
    assert scene.settled().version == 3


def test_a_dp_group_catches_up_beside_one_that_serves() -> None:
    scene = keeping(2, 1)
    scene.engine("e0").kill()
    scene.engine("e1").kill()
    assert scene.world.run_until(lambda: len(scene.world.existing_group.registry.engines) == 1)
    scene.watch.lost_ranks.clear()
    for name in ("e0", "e1"):
        scene.world.restart_engine(name)
    caught_up(scene, "e0", "e1")
    untouched(scene.engine("e2"))


def test_a_catch_up_that_fails_is_tried_again() -> None:
    scene = keeping(1, 1)
    reborn = scene.world.restart_engine("e1")
    reborn.behaviour.fail_next.update({Start, LoadChunk})
    caught_up(scene, "e1")
    assert [each.error is None for each in scene.trainer.catch_ups] == [False, False, True]
    untouched(scene.engine("e0"))


def test_a_trainer_that_dies_in_the_middle_leaves_nobody_stuck() -> None:
    """Nothing of it was loaded: it runs again. What serves, was never paused."""
    scene = keeping(1, 1)
    scene.world.restart_engine("e1")
    scene.until(UpdateState.ARMED)
    scene.trainer.kill()
    scene.rest()
    assert scene.running() == {"e0", "e1"}
    untouched(scene.engine("e0"))
    scene.trainer = scene.world.add_trainer("next")
    assert scene.world.run_until(lambda: scene.trainer.is_joined)
    scene.update(8)
    assert scene.settled().version == 2
    assert scene.versions() == {"e0": 2, "e1": 2}


def test_an_engine_that_dies_in_the_middle_holds_up_nobody() -> None:
    scene = keeping(1, 1)
    reborn = scene.world.restart_engine("e1")
    scene.until(UpdateState.LOADING)
    reborn.kill()
    scene.update(8)
    assert scene.settled().version == 2
    assert scene.trainer.catch_ups[-1].error is not None
    assert scene.versions() == {"e0": 2}


def test_who_has_other_weights_hears_of_nobody() -> None:
    """A trainer that keeps none, or those of another version, could not help."""
    scene = keeping(1, 1, draft=True)
    scene.update(9, target="draft")
    assert scene.settled().version == 2
    heard: list[Message] = []
    scene.trainer.on_answer = heard.append
    scene.world.restart_engine("e1")
    scene.world.run_for(5000.0)
    assert scene.engine("e1").session.is_stale
    assert (scene.trainer.catch_ups, scene.trainer.kept) == ([], (0, 0))


def behind(scene: Scene) -> None:
    """``e1`` is, and nobody does anything about it."""
    scene.trainer.keep_last = False
    scene.trainer.kept = (0, 0)
    reborn = scene.world.restart_engine("e1")
    assert scene.world.run_until(lambda: reborn.is_joined)


def asks(scope: tuple[str, ...]) -> list[Message]:
    """Everything that may be asked for some DP groups alone."""
    return [
        PlanTransfer(scope),
        TransferInit("t9", "sim", b"", 0, 0, {}, scope),
        make_arm("u9", MANIFEST, version=1, scope=scope),
        PauseLocal("u9", "keep", True, 10_000, 60_000, 0, "keep", scope),
    ]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    ("scope", "named"),
    [
        (("e0",), "DP group e0 serves the group's version 1"),
        (("e0", "e1"), "DP group e0 serves the group's version 1"),
        (("e1", "nobody"), "DP group nobody is absent or incomplete"),
    ],
)
def test_who_serves_is_not_asked_to_catch_up(
    scope: tuple[str, ...], named: str, place: int
) -> None:
    scene = keeping(1, 1)
    behind(scene)
    assert scene.refused(asks(scope)[place]) is NackCode.WRONG_STATE
    error = scene.trainer.outcomes[-1].error
    assert named in str(error)
    untouched(scene.engine("e0"))


@pytest.mark.parametrize("place", range(4))
def test_a_group_without_a_version_has_none_to_catch_up_to(place: int) -> None:
    scene = Scene(1, 1)
    assert scene.refused(asks(("e1",))[place]) is NackCode.WRONG_STATE
    assert "no version yet" in str(scene.trainer.outcomes[-1].error)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "the weights of version 2, and the group serves 1"),
        ({"version": 0}, "the weights of version 0, and the group serves 1"),
        ({"target": "draft"}, "a whole set of the model's weights"),
        ({"backend": "lora:a"}, "a whole set of the model's weights"),
    ],
)
def test_engines_catch_up_with_the_whole_model_of_the_groups_version(
    change: dict[str, object], named: str
) -> None:
    scene = keeping(1, 1, draft=True)
    behind(scene)
    arm = make_arm("u9", MANIFEST, version=1, scope=("e1",))
    assert scene.refused(replace(arm, **change)) is NackCode.WRONG_STATE
    assert named in str(scene.trainer.outcomes[-1].error)


def test_an_engine_that_reports_a_later_version_does_not_raise_the_groups() -> None:
    """Not even in the middle of an update: the group's version comes from commits."""
    scene = keeping(1, 1)
    scene.world.restart_engine("e1")
    scene.until(UpdateState.LOADING)
    later = scene.world.add_engine("e2", version=5)
    assert scene.world.run_until(lambda: later.is_joined)
    scene.rest()
    assert scene.world.existing_group.version == 1
    acks = [each for each in scene.engine("e1").sent if isinstance(each, Ack)]
    assert Step.COMMIT in {each.step for each in acks}
    routable = {route.engine for route in scene.world.existing_group.routing.now.engines}
    assert routable == {"e0", "e1"}


def test_an_engine_below_a_version_that_fell_counts_as_closed_until_it_reports() -> None:
    """It was stale, so it may have closed its admission, though it serves the version now."""
    registry, version = EngineRegistry("policy"), GroupVersion()
    engines = {name: peer(name, facts(dp_group=name, version=1)) for name in ("e0", "e1", "e2")}
    engines["e1"].version = engines["e2"].version = 5
    for each in engines.values():
        registry.add(each, joined_late=False)
        version.on_report(registry, each)
    assert version.value == 5
    engines["e1"].version = 1
    version.on_report(registry, engines["e1"])
    assert version.value == 1
    closed = {name for name in engines if registry.is_not_admitting(name)}
    assert closed == {"e0"}


def reporting(*versions: int) -> tuple[EngineRegistry, GroupVersion, list[Peer]]:
    """One engine of each version, whose reports are counted by a restarted broker."""
    registry, version = EngineRegistry("policy"), GroupVersion()
    engines = [
        peer(f"e{place}", facts(dp_group=f"e{place}", version=each))
        for place, each in enumerate(versions)
    ]
    for each in engines:
        registry.add(each, joined_late=False)
        version.on_report(registry, each)
    return registry, version, engines


def report(registry: EngineRegistry, version: GroupVersion, name: str, serves: int) -> Peer:
    """An engine joins, or reports this version."""
    engine = peer(name, facts(dp_group=name, version=serves))
    registry.add(engine, joined_late=True)
    version.on_report(registry, engine)
    return engine


@pytest.mark.parametrize("later", [3, 4, 9])
def test_a_later_version_than_an_update_s_counts_once_the_update_has_failed(later: int) -> None:
    """Until then it would make that update's engines close their admission, for the update's own
    version, too."""
    registry, version, _ = reporting(2)
    version.on_arm(3)
    for name in ("e7", "e8"):
        report(registry, version, name, later)
        assert version.value == 2
    version.on_update_over(registry)
    assert version.value == later


def test_a_later_version_than_an_update_s_does_not_count_after_its_commit() -> None:
    registry, version, _ = reporting(2)
    version.on_arm(3)
    for name in ("e7", "e8"):
        report(registry, version, name, 9)
    version.on_commit(3, registry)
    version.on_update_over(registry)
    assert version.value == 3


def test_a_version_below_an_update_s_counts_at_once() -> None:
    """Most engines may come after the trainer, and serve on while it updates the others."""
    registry, version, _ = reporting(2)
    version.on_arm(9)
    for name in ("e7", "e8"):
        report(registry, version, name, 8)
    assert version.value == 8


def test_one_whose_report_waits_counts_as_it_did_before() -> None:
    """A member of the update has committed before the others, say."""
    registry, version, engines = reporting(2, 2, 1, 1)
    assert version.value == 1
    version.on_arm(3)
    for name in ("e0", "e1"):
        report(registry, version, name, 3)
    assert version.value == 1
    registry.remove(engines[3], "gone")
    version.on_report(registry, engines[3], is_lost=True)
    assert version.value == 2, "the median of 2, 2 and 1"
    version.on_update_over(registry)
    assert version.value == 3


def test_one_that_leaves_does_not_wait_for_an_update_s_end() -> None:
    """Nor one that restarts, and serves an earlier version."""
    registry, version, _ = reporting(2)
    version.on_arm(3)
    gone = report(registry, version, "e7", 9)
    report(registry, version, "e8", 9)
    registry.remove(gone, "gone")
    version.on_report(registry, gone, is_lost=True)
    report(registry, version, "e8", 1)
    assert version.value == 1
    version.on_update_over(registry)
    assert version.value == 1


def test_a_first_commit_below_the_reports_leaves_engines_below_them_out_of_the_routes() -> None:
    """They may have closed their admission, as stale ones do, until they report that it is open."""
    registry, version, _ = reporting(2, 7, 7)
    assert version.value == 7
    version.on_commit(2, registry)
    assert version.value == 2
    assert {name for name in registry.engines if registry.is_not_admitting(name)} == {"e0"}


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_an_update_outlives_the_report_of_one_that_a_restarted_broker_has_not_seen(
    *, staged: bool, fails: bool
) -> None:
    """It serves a later version than the update's. The update's engine admits requests all along;
    if the update fails, it is stale after all."""
    scene = Scene(1, 1)
    for payload in (7, 8):
        scene.update(payload)
        assert scene.settled().error is None
    late = scene.engine("e1")
    scene.world.network.cut(late.route)
    scene.trainer.kill()
    scene.world.restart_broker()
    fresh = scene.world.restart_engine("e0")
    assert scene.world.run_until(lambda: fresh.is_joined)
    scene.trainer = scene.world.add_trainer("t2")
    scene.trainer.staging = STAGING if staged else None
    assert scene.world.run_until(lambda: scene.trainer.is_joined)
    scene.update(9)
    scene.until(UpdateState.LOADING)
    group = scene.world.existing_group
    assert group.update.version == 1, "the trainer knows of no other"
    closed: list[bool] = []
    scene.world.checks.append(lambda: closed.append(fresh.truth.closed))
    scene.world.network.heal(late.route)
    assert scene.world.run_until(lambda: "e1" in group.registry.engines)
    assert group.version == 0
    assert scene.reach["reports wait for an update"]
    if fails:
        scene.trainer.kill()
        assert scene.world.run_until(lambda: group.version == 2)
        assert scene.world.run_until(lambda: fresh.truth.closed)
    assert scene.world.settle()
    scene.watch.check_end()
    if not fails:
        assert scene.trainer.outcomes[-1].error is None
        assert group.version == 1
        assert not any(closed)
    routable = {route.engine for route in group.routing.now.engines}
    assert routable == ({"e1"} if fails else {"e0"})


def test_behind_is_told_with_the_version_and_the_names() -> None:
    scene = keeping(1, 2)
    told: list[StaleEngines] = []
    scene.trainer._catch_up = told.append  # type: ignore[assignment, method-assign]
    for name in ("e1", "e2"):
        scene.world.restart_engine(name)
    assert scene.world.run_until(lambda: bool(told))
    assert told[0] == StaleEngines(1, (scene.engine("e1").dp_group,))
    before = len(told)
    assert scene.world.run_until(lambda: len(told) > before), "as long as it is so"


def test_one_that_lacks_its_draft_is_brought_the_model_once() -> None:
    """It stays quarantined, and no more weights of the model would help."""
    scene = keeping(1, 1, draft=True)
    scene.engine("e1").behaviour.fail_next.add(LoadChunk)
    scene.trainer.run(scene.trainer.update(9, target="draft"))
    scene.world.engines["e0"].behaviour.fail_next.add(LoadChunk)
    assert scene.settled().error is not None
    assert scene.world.existing_group.version == 1
    assert scene.world.run_until(lambda: bool(scene.trainer.catch_ups))
    scene.rest()
    scene.world.run_for(20_000.0)
    assert len(scene.trainer.catch_ups) == 1
    assert scene.running() == set()
    scene.update(9, target="draft")
    assert scene.settled().error is None
    assert scene.running() == {"e0", "e1"}


def test_one_that_the_canary_has_named_is_not_brought_the_same_weights() -> None:
    """It would serve them as wrong as before, and nobody would look."""
    scene = Scene(1, 1, 1)
    scene.trainer.keep_last = scene.trainer.canary = True
    scene.engine("e1").behaviour.twist_next = True
    scene.update(7)
    assert scene.settled().excluded == ("e1",)
    scene.world.run_for(10_000.0)
    assert scene.trainer.catch_ups == []
    assert scene.running() == {"e0", "e2"}
    scene.update(8)
    assert scene.settled().version == 2
    assert scene.running() == {"e0", "e1", "e2"}


def restarts(scene: Scene, name: str) -> None:
    """With the weights and adapters that it boots with."""
    scene.engine(name).leave()
    scene.world.restart_engine(name)
    assert scene.world.run_until(scene.world.has_joined)


def test_an_adapter_s_update_is_no_commit_of_old_weights() -> None:
    """An engine that lacks the model's last update is not at the version that an adapter gives."""
    scene = Scene(1, 1)
    scene.update()
    assert scene.settled().version == 1
    restarts(scene, "e1")
    scene.trainer.run(scene.trainer.remove("a"))
    assert code_of(scene.settled()) is NackCode.WRONG_STATE
    assert scene.versions() == {"e0": 1, "e1": 0}
    scene.update(8)
    assert scene.settled().version == 2
    scene.trainer.run(scene.trainer.remove("a"))
    assert scene.settled().version == 3


def test_who_restarts_takes_adapters_where_the_model_is_never_updated() -> None:
    """What it has booted with is what the others serve."""
    scene = Scene(1, 1)
    for name in ("a", "b"):
        scene.trainer.run(scene.trainer.remove(name))
        version = scene.settled().version
        assert scene.versions() == {"e0": version, "e1": version}
        restarts(scene, "e1")
