"""A pause that nobody renews, in a DP group: its ranks end it as one, or stay paused and say so."""

from __future__ import annotations

import pytest

from bus._protocol.core.effects import Note, Send
from bus._protocol.engine.calls import (
    CallAbortRequests,
    CallPause,
    CallResume,
    SendToPeers,
    SessionEffect,
)
from bus._protocol.engine.lease import LeaseState
from bus._protocol.engine.update_states import EngineUpdateState
from bus.messages import (
    Abort,
    Ack,
    LeasePosition,
    NackCode,
    PauseLocal,
    Resume,
    Step,
    TransferInit,
    UpdateStart,
)
from bus.operations import Restore, Start
from tests.sim.makers import make_arm
from tests.unit.bus._builders import nack_in, only
from tests.unit.bus._session import MANIFEST, PAUSE, Driver

OVER_MS = 5_000.0
AGAIN_MS = OVER_MS + 1_000.0


def rank_of(size: int = 3) -> Driver:
    return Driver(dp_size=size)


def told(effects: list[SessionEffect]) -> list[tuple[LeasePosition, tuple[int, ...], bool]]:
    """What was said to peer ranks."""
    words = [each for each in effects if isinstance(each, SendToPeers)]
    return [(each.vote.position, each.ranks, each.vote.asks) for each in words]


def events(effects: list[SessionEffect]) -> list[str]:
    return [each.event for each in effects if isinstance(each, Note)]


def test_a_rank_does_not_resume_before_all_peers_have_said_that_they_are_clean() -> None:
    """One that is held, or can't say yet, is no reason; the last one that is clean is."""
    driver = rank_of().paused()
    effects = driver.tick(OVER_MS)
    assert told(effects) == [("clean", (1, 2), True)]
    assert events(effects) == ["lease_expired", "lease_undecided"]
    for rank, stand in ((1, "clean"), (2, "held"), (2, "pausing")):
        driver.word(rank, stand)  # type: ignore[arg-type]
        assert driver.session.phase == "paused"
    driver.word(2, "clean")
    assert driver.calls[-1] == CallResume()
    driver.returned()
    assert driver.session.phase == "running"
    assert driver.session.lease.state is LeaseState.FREE
    assert driver.session.next_deadline_ms() is None


def test_who_has_resumed_counts_as_clean() -> None:
    """Its own word may have been lost; it runs, and waits for this one."""
    driver = rank_of(2).paused()
    driver.tick(OVER_MS)
    driver.word(1, "running")
    assert driver.calls[-1] == CallResume()


@pytest.mark.parametrize("position", ["clean", "running"])
def test_a_peer_at_another_version_is_no_peer_to_run_with(position: LeasePosition) -> None:
    """It has committed, and this one has not."""
    driver = rank_of(2).paused()
    driver.tick(OVER_MS)
    assert events(driver.word(1, position, version=4)) == ["lease_settled"]
    assert driver.calls[-1] == CallAbortRequests()
    driver.returned()
    assert driver.session.phase == "paused"
    assert driver.session.next_deadline_ms() is None


def test_a_peer_that_is_partial_keeps_all_paused() -> None:
    """Whatever the others say before or after; their requests are ended."""
    driver = rank_of().paused()
    driver.tick(OVER_MS)
    driver.word(1, "partial")
    assert driver.calls[-1] == CallAbortRequests()
    driver.returned()
    assert driver.word(2, "clean") == []
    assert driver.session.phase == "paused"
    assert told(driver.word(2, "clean", asks=True)) == [("partial", (2,), False)]
    assert driver.tick(10**9) == []


def test_what_a_peer_said_before_the_lease_was_over_does_not_count() -> None:
    """It was true of an earlier pause, maybe."""
    driver = rank_of(2).paused()
    driver.word(1, "clean")
    driver.tick(OVER_MS)
    assert driver.session.phase == "paused"
    driver.word(1, "clean")
    assert driver.calls[-1] == CallResume()


def test_a_rank_that_hears_of_no_peer_stays_paused_asks_on_and_says_so() -> None:
    """Once a second, with the ranks that it misses."""
    driver = rank_of().paused()
    driver.tick(OVER_MS)
    driver.word(2, "held")
    assert driver.session.next_deadline_ms() == AGAIN_MS
    assert driver.tick(AGAIN_MS - 1) == []
    effects = driver.tick(AGAIN_MS)
    assert told(effects) == [("clean", (1, 2), True)]
    (note,) = (each for each in effects if isinstance(each, Note))
    assert note.event == "lease_undecided"
    assert note.fields["waits_for"] == "rank 1: not heard, rank 2: held"


def test_a_rank_that_has_said_that_it_is_clean_holds_its_engine_no_longer() -> None:
    """Whoever it misses, the engines' cores may find each other: since the lease was over, and not
    since it was last asked. Before that it is for this sidecar to act."""
    driver = rank_of(2).paused()
    assert driver.session.held_for_ms(OVER_MS) > 0
    driver.tick(OVER_MS)
    assert driver.session.held_for_ms(OVER_MS) == 0
    driver.tick(AGAIN_MS)
    assert driver.session.held_for_ms(AGAIN_MS) == OVER_MS - AGAIN_MS


def test_a_rank_that_undoes_what_it_began_holds_its_engine_still() -> None:
    """Nor does the core of one resume whose peer rank lacks a part."""
    driver = rank_of(2).started()
    driver.tick(OVER_MS)
    assert driver.session.held_for_ms(OVER_MS) > 0
    driver.returned()
    driver.tick(OVER_MS + 1)
    assert driver.session.held_for_ms(OVER_MS + 1) == -1
    driver.word(1, "partial")
    assert driver.session.held_for_ms(OVER_MS + 1) > 0


def test_a_pause_that_waited_is_forgotten_when_the_engine_ends_its_own() -> None:
    """It is asked for again; else it would follow the resume of a later one."""
    later = PauseLocal("u2", "keep", True, 5_000, 60_000, 0, "keep")
    driver = rank_of(2).paused()
    driver.tick(OVER_MS)
    driver.command(later)
    driver.session.found_running()
    driver.command(later)
    driver.returned()
    assert driver.session.phase == "paused"
    driver.command(Resume("u2"))
    driver.returned()
    assert driver.session.phase == "running"
    assert driver.running is None


def test_a_rank_restores_what_it_began_before_it_says_that_it_is_clean() -> None:
    """Until then it can't say."""
    driver = rank_of(2).started()
    driver.tick(OVER_MS)
    assert driver.calls[-1] == Restore("model")
    assert told(driver.word(1, "clean", asks=True)) == [("pausing", (1,), False)]
    assert driver.session.phase == "updating"
    driver.returned()
    assert driver.session.next_deadline_ms() is not None
    driver.tick(OVER_MS + 1)
    assert driver.calls[-1] == CallResume()  # the peer rank was clean, and is


def test_a_rank_that_loaded_a_part_is_partial_and_tells() -> None:
    """Its peer ranks stay with it."""
    driver = rank_of(2).loaded()
    driver.tick(OVER_MS)
    assert driver.calls[-1] == CallAbortRequests()
    driver.returned()
    assert driver.session.phase == "quarantined"
    assert told(driver.word(1, "clean", asks=True)) == [("partial", (1,), False)]
    assert CallResume() not in driver.calls


def test_an_update_that_is_armed_and_no_more_changes_no_stand() -> None:
    """Of one that is clean, or partial: nothing is touched before it starts."""
    clean = rank_of(2).paused()
    clean.tick(OVER_MS)
    partial = rank_of(2).loaded()
    partial.command(Abort("u1", "it broke off"))
    partial.returned()
    for driver, stand in ((clean, "clean"), (partial, "partial")):
        driver.command(TransferInit("t2", "sim", b"", 0, 0, {}))
        driver.returned()
        driver.command(make_arm("u2", MANIFEST, version=5))
        driver.returned()
        assert told(driver.word(1, "held", asks=True)) == [(stand, (1,), False)]


def test_a_staged_update_ends_with_the_lease() -> None:
    """This rank has missed its ABORT, and says nothing of it as long as it is paused: it would keep
    what it has staged for as long as a peer rank is quarantined."""
    driver = rank_of(2).stages().paused()
    driver.tick(OVER_MS)
    assert driver.calls[-1] == Restore("model", staged=True)
    driver.returned()
    assert driver.session.update.state is EngineUpdateState.NONE
    driver.tick(AGAIN_MS)
    driver.word(1, "partial")
    assert driver.session.lease.state is LeaseState.SETTLED


def test_who_said_clean_begins_no_update() -> None:
    """A peer rank may have resumed on that word."""
    driver = rank_of(2).armed().paused()
    driver.tick(OVER_MS)
    driver.command(make_arm("u2", MANIFEST, version=4))
    driver.returned()
    assert nack_in(driver.command(UpdateStart("u2"))).code is NackCode.WRONG_STATE


def test_who_said_clean_pauses_for_nobody_else_before_it_has_resumed() -> None:
    """The peer rank runs, so this one does, and is then paused with it."""
    driver = rank_of(2).paused()
    driver.tick(OVER_MS)
    assert driver.command(PauseLocal("u2", "keep", True, 5_000, 60_000, 0, "keep")) == []
    driver.word(1, "running")
    assert driver.calls[-1] == CallResume()
    effects = driver.returned()
    acked = [each.message for each in effects if isinstance(each, Send)]
    assert [(each.step, each.update_id) for each in acked if isinstance(each, Ack)] == [
        (Step.RESUME, "u1"),
        (Step.PAUSE_LOCAL, "u2"),
    ]
    assert driver.calls[-1] == CallPause("keep", True)
    assert driver.session.lease.state is LeaseState.HELD


def test_requests_that_are_ended_for_a_peers_sake_leave_the_next_update_armed() -> None:
    """It is what brings them all back."""
    driver = rank_of(2).armed().paused()
    driver.tick(OVER_MS)
    driver.word(1, "partial")
    assert driver.calls[-1] == CallAbortRequests()
    assert driver.returned() == []
    driver.command(PauseLocal("u2", "keep", True, 5_000, 60_000, 0, "keep"))
    driver.command(UpdateStart("u1"))
    assert driver.calls[-1] == Start(recover=False, target="model")


def test_a_pause_that_waited_for_a_peer_is_taken_when_that_turns_out_to_be_partial() -> None:
    """There is no resume that it could follow."""
    driver = rank_of(2).paused()
    driver.tick(OVER_MS)
    driver.command(PauseLocal("u2", "keep", True, 5_000, 60_000, 0, "keep"))
    acked = only(driver.word(1, "partial"), Ack)
    assert (acked.step, acked.update_id) == (Step.PAUSE_LOCAL, "u2")
    assert driver.session.lease.state is LeaseState.HELD


def test_a_lease_that_is_over_is_not_renewed_but_a_resume_ends_it() -> None:
    """Peer ranks count on it; the broker's resume is of all of them."""
    driver = rank_of(2).paused()
    driver.tick(OVER_MS)
    driver.session.on_lease_renewed(1, "u1", OVER_MS + 1)
    assert driver.session.lease.state is LeaseState.OVER
    driver.command(Resume("u1"))
    assert driver.calls[-1] == CallResume()


def test_a_rank_whose_pause_does_not_return_asks_its_peers_to_join_it() -> None:
    """Half-made: it would never return."""
    driver = rank_of(2)
    driver.command(PAUSE)
    assert told(driver.tick(OVER_MS)) == [("pausing", (1,), True)]
    peer = rank_of(2)
    assert peer.word(0, "pausing") == []  # nobody is one's own peer rank
    assert peer.word(2, "pausing") == []
    peer.word(1, "pausing")
    assert peer.calls == [CallPause("keep", clear_cache=False)]


def test_a_rank_that_has_resumed_from_a_pause_does_not_join_it_again() -> None:
    """The word was under way for long."""
    driver = rank_of(2).paused()
    driver.command(Resume("u1"))
    driver.returned()
    calls = list(driver.calls)
    driver.word(1, "pausing", pause_id="u1")
    assert driver.calls == calls


def test_a_rank_that_joined_its_peers_pause_ends_it_with_them() -> None:
    """Its lease is over as soon as its pause is made."""
    driver = rank_of(2)
    driver.word(1, "pausing", now_ms=50.0)
    driver.returned()
    driver.tick(50.0)
    assert driver.session.phase == "paused"
    driver.word(1, "clean")
    assert driver.calls[-1] == CallResume()


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
