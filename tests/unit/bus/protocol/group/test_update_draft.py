"""Two targets of updates, the model and its draft: what is partial, and what mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from bus._protocol.engine.calls import CallAbortRequests
from bus._protocol.group.update import UpdateState
from bus.errors import Refused
from bus.messages import (
    Abort,
    Ack,
    Commit,
    NackCode,
    Resume,
    Sleep,
    Step,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    Wake,
)
from bus.operations import ArmManifest, LoadChunk, Restore, Start
from tests.sim.makers import make_arm, make_chunk, make_sent
from tests.unit.bus._builders import nack_in, only
from tests.unit.bus._scene import Scene, code_of
from tests.unit.bus._session import MANIFEST, Driver

if TYPE_CHECKING:
    from bus.messages import Target

BOTH: tuple[Target, ...] = ("model", "draft")
OTHER: dict[Target, Target] = {"model": "draft", "draft": "model"}


class Updates:
    """An engine with a draft, paused, with one update after the other."""

    def __init__(self) -> None:
        self.driver = Driver(draft=True).paused()
        self.driver.command(TransferInit("t1", "sim", b"", 0, 0, {}))
        self.driver.returned()
        self.version = 3
        self.id = ""

    def start(self, target: Target) -> None:
        """Armed and started."""
        self.version += 1
        self.id = f"v{self.version}"
        arm = make_arm(self.id, MANIFEST, version=self.version, target=target)
        self.driver.command(replace(arm, after=self.version - 1))
        self.driver.returned()
        self.driver.command(UpdateStart(self.id))
        self.driver.returned()

    def apply(self, chunks: int) -> None:
        for k in range(chunks):
            self.driver.command(make_chunk(self.id, MANIFEST, k, 1))
            self.driver.command(make_sent(self.id, MANIFEST, k, 1))
            for _ in ("received", "loaded"):
                self.driver.returned()

    def break_off(self, target: Target, chunks: int = 1) -> Ack:
        """An update of which so many chunks are loaded, given up."""
        self.start(target)
        self.apply(chunks)
        effects = self.driver.command(Abort(self.id, ""))
        if self.driver.running is not None:
            effects = self.driver.returned()
        return only(effects, Ack)

    def whole(self, target: Target) -> Ack:
        """One that is committed; what its engine says to that."""
        self.start(target)
        self.apply(MANIFEST.chunks)
        self.driver.command(UpdateFinish(self.id))
        self.driver.returned()
        self.driver.command(Commit(self.id, self.version, "", ()))
        return only(self.driver.returned(), Ack)


def test_the_target_goes_with_the_calls() -> None:
    """The engine is told at the arming, and at the start."""
    updates = Updates()
    assert updates.whole("draft").outcome == ""
    calls = updates.driver.calls
    assert ArmManifest(MANIFEST, "draft", digest=MANIFEST.digest) in calls
    assert Start(recover=False, target="draft") in calls
    assert updates.driver.session.version == 4


def test_a_draft_is_refused_where_there_is_none() -> None:
    """Before anything is asked of the engine."""
    driver = Driver()
    driver.command(TransferInit("t1", "sim", b"", 0, 0, {}))
    driver.returned()
    calls = list(driver.calls)
    nack = nack_in(driver.command(make_arm("u1", MANIFEST, version=4, target="draft")))
    assert (nack.code, nack.field) == (NackCode.DRAFT_MISSING, "target")
    assert "speculative_config" in nack.hint
    assert driver.calls == calls
    driver.command(replace(make_arm("u1", MANIFEST, version=4), after=driver.session.version))
    assert driver.calls[-1] == ArmManifest(MANIFEST, "model", digest=MANIFEST.digest)


@pytest.mark.parametrize("target", BOTH)
def test_a_part_is_mended_by_a_whole_of_the_same_target(target: Target) -> None:
    """And by nothing else: after another's commit there is no resume."""
    updates = Updates()
    driver = updates.driver
    assert updates.break_off(target).outcome == "partial"
    assert driver.session.phase == "quarantined"
    committed = updates.whole(OTHER[target])
    assert (committed.step, committed.outcome) == (Step.COMMIT, "partial")
    assert Start(recover=True, target=OTHER[target]) in driver.calls
    assert driver.session.version == updates.version
    assert driver.session.phase == "quarantined"
    assert nack_in(driver.command(Resume("u1"))).code is NackCode.WRONG_STATE
    assert updates.whole(target).outcome == ""
    assert Start(recover=True, target=target) in driver.calls
    assert driver.session.phase == "paused"
    driver.command(Resume("u1"))
    driver.returned()
    assert driver.session.phase == "running"


def test_a_commit_that_is_asked_again_is_answered_alike() -> None:
    """The first answer may have been lost."""
    updates = Updates()
    updates.break_off("draft")
    updates.whole("model")
    again = only(updates.driver.command(Commit(updates.id, updates.version, "", ())), Ack)
    assert again.outcome == "partial"


@pytest.mark.parametrize("partial", BOTH)
def test_one_that_loaded_nothing_is_restored_whatever_else_is_partial(partial: Target) -> None:
    """Its target has all of its weights, and is to keep them."""
    updates = Updates()
    updates.break_off(partial)
    assert updates.break_off(OTHER[partial], chunks=0).outcome == "partial"
    assert updates.driver.calls[-1] == Restore(OTHER[partial])
    assert updates.driver.session.update.partial == {partial}
    calls = list(updates.driver.calls)
    updates.break_off(partial, chunks=0)
    assert not any(isinstance(c, Restore) for c in updates.driver.calls[len(calls) :])
    assert updates.whole(partial).outcome == ""


def test_both_may_be_partial() -> None:
    """Each is mended by its own."""
    updates = Updates()
    updates.break_off("draft")
    updates.break_off("model")
    assert updates.driver.session.update.partial == set(BOTH)
    assert updates.whole("draft").outcome == "partial"
    assert updates.whole("model").outcome == ""


def test_a_target_that_cannot_be_restored_is_partial() -> None:
    """Beside the other."""
    updates = Updates()
    updates.break_off("draft")
    updates.start("model")
    updates.driver.command(Abort(updates.id, ""))
    updates.driver.failed()
    assert updates.driver.session.update.partial == set(BOTH)


def test_a_sleep_that_discards_weights_discards_the_drafts() -> None:
    """Both are brought, in the sleep, before anybody is resumed."""
    updates = Updates()
    driver = updates.driver
    driver.command(Sleep("u1", 2))
    driver.returned()
    driver.command(Wake("u1"))
    driver.returned()
    assert updates.whole("model").outcome == "partial"
    assert driver.session.phase == "weights_discarded"
    assert nack_in(driver.command(Resume("u1"))).code is NackCode.WRONG_STATE
    assert updates.whole("draft").outcome == ""
    assert driver.session.phase == "asleep"


# -- a group ----------------------------------------------------------------------------


def test_an_update_of_the_drafts_alone() -> None:
    """The version grows, the model's weights stay; the status says which it is of."""
    scene = Scene(2, 1, draft=True)
    scene.update(7)
    assert scene.settled().version == 1
    scene.update(8, "draft")
    scene.until(UpdateState.LOADING)
    assert scene.world.existing_group.status(0.0).update_target == "draft"
    outcome = scene.settled()
    assert (outcome.version, outcome.error) == (2, None)
    assert scene.world.existing_group.status(0.0).update_target == "model"
    for engine in scene.world.live_engines:
        assert set(engine.truth.models["model"].values()) == {7}
        assert set(engine.truth.models["draft"].values()) == {8}


def test_engines_without_a_draft_are_named() -> None:
    """Nothing is armed anywhere, and all run on."""
    scene = Scene(1, 1)
    scene.update(8, "draft")
    outcome = scene.settled()
    assert code_of(outcome) is NackCode.DRAFT_MISSING
    assert isinstance(outcome.error, Refused)
    assert outcome.error.nack.peer in ("e0", "e1")
    assert scene.running() == {"e0", "e1"}
    assert not any(isinstance(c, ArmManifest) for e in scene.world.live_engines for c in e.calls)


def test_a_part_of_a_draft_outlasts_the_models_updates() -> None:
    """Others serve on meanwhile, and whoever is left out is back after the draft's."""
    scene = Scene(1, 1, draft=True)
    scene.engine("e1").behaviour.fail_next.add(LoadChunk)
    scene.update(7, "draft")
    assert scene.settled().excluded == ("e1",)
    assert CallAbortRequests() in scene.engine("e1").calls
    scene.update(8)
    assert scene.settled().error is None
    assert scene.running() == {"e0"}
    assert "e1" in scene.world.existing_group.registry.quarantined
    assert scene.versions() == {"e0": 2, "e1": 2}
    scene.update(9, "draft")
    assert scene.settled().error is None
    assert scene.running() == {"e0", "e1"}
    assert not scene.world.existing_group.registry.quarantined


def test_the_last_engine_of_a_group_waits_for_its_draft() -> None:
    """The model's update is committed, and there is nobody to resume."""
    scene = Scene(1, draft=True)
    scene.engine("e0").behaviour.fail_next.add(LoadChunk)
    scene.update(7, "draft")
    scene.settled()
    scene.update(8)
    assert code_of(scene.settled()) is NackCode.EMPTY_GROUP
    assert scene.versions() == {"e0": 2}  # the first was given to what failed
    scene.update(9, "draft")
    assert scene.settled().error is None
    assert scene.running() == {"e0"}


def test_engines_of_another_version_are_brought_to_it_first() -> None:
    """A version is one set of the model's weights: the draft's update has one as well."""
    scene = Scene(1, draft=True)
    scene.update(7)
    scene.settled()
    scene.world.add_dp_group(1)
    assert scene.world.run_until(scene.world.has_joined)
    scene.update(8, "draft")
    outcome = scene.settled()
    assert code_of(outcome) is NackCode.WRONG_STATE
    assert isinstance(outcome.error, Refused)
    assert (outcome.error.nack.peer, outcome.error.nack.field) == ("e1", "target")
    scene.update(9)
    scene.settled()
    scene.update(8, "draft")
    assert scene.settled().error is None
    assert scene.versions() == {"e0": 3, "e1": 3}


def test_a_group_that_slept_without_weights_needs_both() -> None:
    """In the block, or after it; until then nobody is resumed."""
    scene = Scene(2, draft=True)
    scene.trainer.run(scene.trainer.sleep(2, payload=7, hold_ms=50.0))
    assert code_of(scene.settled()) is NackCode.EMPTY_GROUP
    assert set(scene.world.existing_group.registry.quarantined) == {"e0", "e1"}
    assert scene.running() == set()
    scene.update(8, "draft")
    assert scene.settled().error is None
    assert scene.running() == {"e0", "e1"}
