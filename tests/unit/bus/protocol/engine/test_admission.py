"""Who serves an older version than its group takes no requests, until it has got that version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bus._protocol.core.effects import Note, Send
from bus._protocol.engine.calls import CallAbortRequests, CallAdmit, CallPause, CallResume
from bus.messages import (
    Ack,
    Commit,
    Heartbeat,
    PauseLocal,
    Resume,
    TransferInit,
    UpdateFinish,
)
from tests.unit.bus._session import MANIFEST, Driver

if TYPE_CHECKING:
    from collections.abc import Iterable

HERS, THE_GROUPS = 3, 4  # versions: a driver's engine is at 3


def told(driver: Driver, version: int = THE_GROUPS) -> list[object]:
    return list(driver.take(driver.session.on_group_version(version, 0.0)))


def noted(effects: Iterable[object]) -> Note:
    """The one line for the log."""
    (note,) = [each for each in effects if isinstance(each, Note)]
    return note


def outcome(effects: Iterable[object]) -> str:
    """What an ACK says of a RESUME."""
    (found,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Ack)]
    return found.outcome


def closed() -> Driver:
    """An engine that runs, is behind, and knows it."""
    driver = Driver()
    told(driver)
    driver.returned()
    return driver


def brought_to(driver: Driver, version: int) -> None:
    """One whole update, but for its resume."""
    driver.loaded(MANIFEST.chunks)
    driver.command(UpdateFinish("u1"))
    driver.returned()
    driver.command(Commit("u1", version, "", ()))
    driver.returned()


@pytest.mark.parametrize("returns", [True, False])
def test_who_hears_that_it_is_behind_during_a_call_closes_its_door_after_it(returns: bool) -> None:
    """Whether that call fails or not; the next heartbeat's answer may be long in coming."""
    driver = Driver()
    driver.command(TransferInit("t1", "sim", b"", 0, 0, {}))
    assert told(driver) == []
    effects = driver.returned() if returns else driver.failed()
    assert noted(effects).event == "closed_stale"
    assert driver.running == CallAbortRequests()


def test_a_door_that_opens_while_its_group_goes_ahead_is_closed_again() -> None:
    driver = closed()
    told(driver, HERS)
    assert driver.running == CallAdmit()
    assert told(driver) == []
    driver.returned()
    assert driver.running == CallAbortRequests()


def test_who_runs_and_hears_that_it_is_behind_closes_its_door_once() -> None:
    """Its requests end with the tokens they have; it is said in the log, and not twice."""
    driver = Driver()
    assert told(driver, HERS) == []
    note = noted(told(driver))
    fields = {"version": HERS, "group_version": THE_GROUPS}
    assert (note.event, note.fields) == ("closed_stale", fields)
    assert driver.calls == [CallAbortRequests()]
    assert told(driver) == [], "the call is under way"
    driver.returned()
    assert told(driver) == []
    assert driver.session.admission.closed
    assert driver.session.phase == "running"


def test_a_door_that_could_not_be_closed_is_closed_with_the_next_heartbeat() -> None:
    """As often as it takes; the log has one line of it, and one of each failure."""
    driver = Driver()
    told(driver)
    for _ in range(3):
        assert noted(driver.failed()).event == "abort_failed"
        assert told(driver) == [CallAbortRequests()]
    driver.returned()
    assert told(driver) == []


def test_the_resume_after_the_groups_version_opens_it() -> None:
    """Not the commit, and not the resume of one who is at an older version still."""
    driver = closed()
    brought_to(driver, THE_GROUPS)
    assert driver.session.admission.closed
    assert told(driver) == []
    driver.command(Resume("u1"))
    assert driver.calls[-1] == CallResume(opens=True)
    assert outcome(driver.returned()) == ""
    assert not driver.session.admission.closed
    assert told(driver) == []


def test_a_pause_that_ends_with_nothing_loaded_leaves_it_closed() -> None:
    """A catch-up that was given up."""
    driver = closed().paused()
    driver.command(Resume("u1"))
    assert driver.calls[-1] == CallResume(opens=False)
    assert outcome(driver.returned()) == "closed", "the broker must not take it for open"
    assert driver.session.admission.closed
    assert told(driver) == []


@pytest.mark.parametrize("by_lease", [False, True])
def test_who_falls_behind_in_a_pause_has_its_door_closed_before_its_resume(by_lease: bool) -> None:
    """Others have committed without it: it generates no token of the old version any more."""
    driver = Driver().paused()
    assert told(driver) == [], "it serves nobody now"
    if by_lease:
        driver.tick(60_000.0)
    else:
        driver.command(Resume("u1"))
    assert driver.calls == [CallPause("keep", True), CallAbortRequests()]
    driver.returned()
    assert driver.calls[-1] == CallResume(opens=False)
    driver.returned()
    assert driver.session.admission.closed


def test_a_resume_tells_it_too() -> None:
    """Before any heartbeat is answered."""
    driver = Driver().paused()
    driver.command(Resume("u1", THE_GROUPS))
    assert driver.calls[-1] == CallAbortRequests()
    driver.returned()
    assert driver.calls[-1] == CallResume(opens=False)
    driver.returned()
    assert driver.session.is_stale
    assert driver.session.admission.closed


def test_who_hears_of_it_while_it_is_resumed_closes_its_door_then() -> None:
    """The resume is under way, and is not to be taken back."""
    driver = Driver().paused()
    driver.command(Resume("u1"))
    assert told(driver) == []
    driver.returned()
    assert driver.calls[-1] == CallAbortRequests()


def test_who_is_behind_nobody_any_more_opens_it() -> None:
    """All who served the later version are gone, and the bus has forgotten it."""
    driver = closed()
    assert noted(told(driver, HERS)).event == "opened"
    assert driver.calls[-1] == CallAdmit()
    assert noted(driver.failed()).event == "open_failed"
    told(driver, HERS)
    driver.returned()
    assert not driver.session.admission.closed
    assert told(driver, HERS) == []


def test_who_is_quarantined_stays_behind_its_door_whatever_the_group_serves() -> None:
    """It has no whole version."""
    driver = Driver()
    driver.session.update.on_found({"model"})
    assert driver.session.admission.closed
    assert told(driver, 0) == told(driver, HERS) == []
    assert driver.calls == []


def test_a_pause_that_comes_meanwhile_waits_for_the_door() -> None:
    """One engine call at a time."""
    driver = Driver()
    told(driver)
    driver.command(PauseLocal("u1", "keep", False, 5_000, 60_000, 0, "keep"))
    assert driver.calls == [CallAbortRequests()]
    driver.returned()
    assert driver.calls[-1] == CallPause("keep", False)


def test_who_opens_its_door_says_so_at_once() -> None:
    """So that it is routable, without waiting for the next heartbeat."""
    driver = closed()
    told(driver, HERS)
    beat = next(each.message for each in driver.returned() if isinstance(each, Send))
    assert beat == Heartbeat("running", HERS, 0, "", closed=False)
