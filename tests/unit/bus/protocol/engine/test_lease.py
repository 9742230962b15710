"""A pause that nobody renews: an engine alone ends it; a rank leaves that to the cores."""

from __future__ import annotations

import pytest

from bus._protocol.core.effects import Note, Send
from bus._protocol.engine.calls import (
    CallAbortRequests,
    CallAdmit,
    CallPause,
    CallResume,
    SessionEffect,
)
from bus._protocol.engine.lease import LeaseState
from bus._protocol.engine.update_states import EngineUpdateState
from bus.messages import Abort, Ack, NackCode, PauseLocal, Resume, Sleep, Step, UpdateStart
from bus.operations import Restore, Start
from tests.sim.makers import make_arm
from tests.unit.bus._builders import nack_in
from tests.unit.bus._session import MANIFEST, PAUSE, Driver

OVER_MS = 5_000.0
AGAIN_MS = OVER_MS + 1_000.0
LATER = PauseLocal("u2", "keep", True, 5_000, 60_000, 0, "keep")


def rank() -> Driver:
    return Driver(dp_size=2)


def events(effects: list[SessionEffect]) -> list[str]:
    return [each.event for each in effects if isinstance(each, Note)]


def test_a_rank_does_not_resume_by_itself() -> None:
    """Its core does, with all ranks; the sidecar finds that on the lease page."""
    driver = rank().paused()
    assert events(driver.tick(OVER_MS)) == ["lease_expired"]
    assert driver.tick(AGAIN_MS) == []
    assert driver.calls == [CallPause("keep", True)]
    assert driver.session.phase == "paused"
    driver.take(driver.session.on_core_resumed(AGAIN_MS))
    assert driver.session.phase == "running"
    assert driver.session.lease.state is LeaseState.FREE
    assert driver.session.next_deadline_ms() is None


def test_an_engine_alone_resumes_by_itself() -> None:
    driver = Driver().paused()
    driver.tick(OVER_MS)
    assert driver.calls[-1] == CallResume()


def test_a_rank_gives_its_core_the_decision_when_nothing_is_left_to_undo() -> None:
    """Until then the core must wait: the lease on its page is in force."""
    driver = rank().started()
    assert driver.session.held_for_ms(OVER_MS) > 0
    driver.tick(OVER_MS)
    assert driver.calls[-1] == Restore("model")
    assert driver.session.held_for_ms(OVER_MS) > 0
    driver.returned()
    driver.tick(OVER_MS + 1)
    assert driver.session.held_for_ms(OVER_MS + 1) == -1
    assert driver.session.phase == "paused"


def test_a_rank_whose_pause_does_not_return_gives_its_core_the_decision() -> None:
    """The core asks its peer ranks to pause, too, and only then the pause call returns."""
    driver = rank()
    driver.command(PAUSE)
    driver.tick(OVER_MS)
    assert driver.session.held_for_ms(OVER_MS + 1) == -1
    driver.returned()
    assert driver.session.held_for_ms(OVER_MS + 1) == -1


def test_a_rank_that_loaded_a_part_stays_paused_and_its_lease_is_in_force() -> None:
    """Its core votes all the same, as soon as a peer rank's has."""
    driver = rank().loaded()
    driver.tick(OVER_MS)
    assert driver.calls[-1] == CallAbortRequests()
    driver.returned()
    assert driver.session.held_for_ms(OVER_MS + 1) > 0
    assert events(driver.tick(OVER_MS + 1)) == ["lease_settled"]
    assert driver.session.phase == "quarantined"
    assert driver.session.lease.state is LeaseState.SETTLED
    assert driver.session.held_for_ms(AGAIN_MS) > 0
    assert driver.tick(10**9) == []


@pytest.mark.parametrize("renewed", [False, True])
def test_a_rank_that_the_cores_keep_paused_ends_its_requests(renewed: bool) -> None:
    """Its own weights are whole, so it is not quarantined for good; also if its lease was renewed
    when it was too late."""
    driver = rank().armed().paused()
    if not renewed:
        driver.tick(OVER_MS)
    effects = driver.take(driver.session.on_core_quarantined(OVER_MS))
    assert events(effects) == ["lease_settled"]
    assert driver.calls[-1] == CallAbortRequests()
    assert driver.returned() == []
    assert driver.session.phase == "paused"
    assert driver.session.next_deadline_ms() is None
    driver.command(LATER)  # the update that brings all of them back is still armed
    driver.command(UpdateStart("u1"))
    assert driver.calls[-1] == Start(recover=False, target="model")


@pytest.mark.parametrize("partial", [False, True])
def test_a_decision_about_an_earlier_pause_does_not_end_the_lease_of_this_one(
    partial: bool,
) -> None:
    """The cores have decided when a peer rank's pause was over. What the new pause begins is undone
    when its own lease ends."""
    driver = rank()
    if partial:
        driver.loaded().tick(OVER_MS)
        driver.returned()
        driver.tick(OVER_MS + 1)
    driver.command(LATER)
    if driver.running:
        driver.returned()
    assert driver.session.admission.closed == partial
    driver.take(driver.session.on_core_quarantined(1.0))
    assert driver.session.lease.state is LeaseState.HELD
    assert (driver.running is None) == partial
    if not partial:
        driver.returned()
    assert driver.calls[-1] == CallAbortRequests()
    driver.command(Sleep("u2", 2))
    driver.returned()
    assert driver.session.phase == "weights_discarded"
    assert events(driver.tick(10**9)) == ["lease_expired", "lease_settled"]
    driver.returned()
    assert driver.session.phase == "quarantined"


def test_a_rank_whose_core_could_not_undo_an_update_is_quarantined() -> None:
    """The sidecar was stopped, and the core acted for it."""
    driver = rank().started()
    driver.take(driver.session.on_core_quarantined(OVER_MS))
    assert driver.session.phase == "quarantined"
    assert driver.calls[-1] == CallAbortRequests()


def test_a_rank_that_resumes_opens_admission() -> None:
    """Its core resumes the engine as it is."""
    driver = rank().paused()
    driver.session.admission.closed = True
    driver.tick(OVER_MS)
    driver.take(driver.session.on_core_resumed(OVER_MS))
    assert driver.calls[-1] == CallAdmit()


def test_a_stale_rank_closes_admission_before_its_core_decides() -> None:
    """The core would open its engine for requests that want a later version."""
    driver = rank().paused()
    driver.session.on_group_version(4, 0.0)
    driver.tick(OVER_MS)
    assert driver.calls[-1] == CallAbortRequests()
    assert driver.session.held_for_ms(OVER_MS + 1) > 0


def test_an_update_that_is_armed_and_no_more_outlasts_the_lease() -> None:
    """It belongs to a later pause."""
    driver = rank().armed().paused()
    driver.tick(OVER_MS)
    assert driver.session.held_for_ms(OVER_MS + 1) == -1
    driver.take(driver.session.on_core_resumed(OVER_MS))
    assert driver.session.update.state is EngineUpdateState.ARMED


def test_a_staged_update_ends_with_the_lease() -> None:
    """This rank has missed its ABORT, and says nothing of it as long as it is paused: it would keep
    what it has staged for as long as a peer rank is quarantined."""
    driver = rank().stages().paused()
    driver.tick(OVER_MS)
    assert driver.calls[-1] == Restore("model", staged=True)
    driver.returned()
    assert driver.session.update.state is EngineUpdateState.NONE


def test_while_cores_decide_no_update_begins() -> None:
    """A peer rank may have resumed on this rank's vote."""
    driver = rank().armed().paused()
    driver.tick(OVER_MS)
    driver.command(make_arm("u2", MANIFEST, version=4))
    driver.returned()
    assert nack_in(driver.command(UpdateStart("u2"))).code is NackCode.WRONG_STATE


def test_another_pause_takes_the_decision_from_the_cores() -> None:
    """Its lease takes this rank's vote back. A repetition of the pause whose lease is over doesn't:
    the cores complete it."""
    driver = rank().paused()
    driver.tick(OVER_MS)
    driver.command(PAUSE)
    assert driver.session.held_for_ms(OVER_MS + 1) == -1
    [acked] = [each.message for each in driver.command(LATER) if isinstance(each, Send)]
    assert isinstance(acked, Ack)
    assert (acked.step, acked.update_id) == (Step.PAUSE_LOCAL, "u2")
    assert driver.session.lease.state is LeaseState.HELD
    assert driver.session.held_for_ms(OVER_MS + 1) > 0


def test_a_pause_that_waited_is_forgotten_when_the_core_ends_its_own() -> None:
    """It is asked for again; else it would follow the resume of a later one."""
    driver = rank().paused()
    driver.tick(OVER_MS)
    driver.command(LATER)
    driver.take(driver.session.on_core_resumed(OVER_MS))
    driver.command(LATER)
    driver.returned()
    assert driver.session.phase == "paused"
    driver.command(Resume("u2"))
    driver.returned()
    assert driver.session.phase == "running"
    assert driver.running is None


def test_a_lease_that_is_over_is_not_renewed_but_a_resume_ends_it() -> None:
    """Cores count on it; the broker's resume is of all ranks."""
    driver = rank().paused()
    driver.tick(OVER_MS)
    driver.session.on_lease_renewed(1, "u1", OVER_MS + 1)
    assert driver.session.lease.state is LeaseState.OVER
    driver.command(Resume("u1"))
    assert driver.calls[-1] == CallResume()


def test_a_part_that_broke_off_earlier_keeps_a_rank_paused() -> None:
    driver = rank().loaded()
    driver.command(Abort("u1", "it broke off"))
    driver.returned()
    assert events(driver.tick(OVER_MS)) == ["lease_expired", "lease_settled"]


def test_a_pause_that_failed_is_made_once_more_before_anybody_resumes() -> None:
    """It may have been made, or not; only one that returns tells."""
    driver = Driver()
    driver.command(PAUSE)
    driver.failed()
    assert driver.session.phase == "pause_unknown"
    driver.tick(OVER_MS)
    assert driver.calls == [CallPause("keep", True), CallPause("keep", True)]
    driver.returned()
    driver.tick(AGAIN_MS)
    assert driver.calls[-1] == CallResume()
