"""The watchdog of a DP group: each row of its table, at its limits, and the words it finds."""

from __future__ import annotations

import pytest

from bus._protocol.dp.watchdog import Diagnosis, Watchdog, describe_stall
from bus.messages import CorePhase, CoreStatus

MEETINGS: list[CorePhase] = ["step", "dummy", "sync", "barrier"]
AWAY: list[CorePhase] = ["idle", "work"]


def status(phase: CorePhase, since_ms: float = 0.0, *, step: int = 40, wave: int = 3) -> CoreStatus:
    return CoreStatus(phase, since_ms, step, wave, 1)


def watchdog(*pages: CoreStatus, size: int = 0, now_ms: float = 0.0) -> Watchdog:
    """One of as many ranks as there are pages; all were told at ``now_ms``."""
    dog = Watchdog(size or len(pages))
    for rank, page in enumerate(pages):
        dog.report(rank, f"e{rank}", page, now_ms)
    return dog


def health(*pages: CoreStatus) -> str:
    return watchdog(*pages).diagnose(0.0).health


# -- ok --------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [*MEETINGS, *AWAY])
def test_ranks_that_move_are_ok(phase: CorePhase) -> None:
    """And nothing is said of them; at the limit itself they still do."""
    assert watchdog(status(phase), status("step")).diagnose(0.0) == Diagnosis("ok")
    assert health(status(phase, 2_000), status("step")) == "ok"


@pytest.mark.parametrize("phase", AWAY)
def test_idle_ranks_are_ok_for_ever(phase: CorePhase) -> None:
    """Only who waits for others can be stuck."""
    assert health(status(phase, 10**9), status("idle", 10**9)) == "ok"


# -- slow ------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", MEETINGS)
def test_a_long_collective_with_everybody_in_it_is_slow(phase: CorePhase) -> None:
    """A prefill takes its time: nobody is absent, so nobody is to blame."""
    found = watchdog(status(phase, 2_001), status(phase, 1_500)).diagnose(0.0)
    assert (found.health, found.absent) == ("slow", ())
    assert health(status(phase, 60_000), status(phase, 59_000)) == "slow"


@pytest.mark.parametrize("phase", MEETINGS)
@pytest.mark.parametrize("away", AWAY)
def test_a_rank_that_is_waited_for_and_may_still_come_is_slow(
    phase: CorePhase, away: CorePhase
) -> None:
    """Up to WEDGED_MS; it is named already."""
    found = watchdog(status(phase, 10_000), status(away, 9_000)).diagnose(0.0)
    assert (found.health, found.absent) == ("slow", (1,))


def test_work_and_dummy_batches_meet_in_the_same_forward_pass() -> None:
    """A rank that steps for the others is not absent."""
    found = watchdog(status("step", 11_000), status("dummy", 11_000)).diagnose(0.0)
    assert (found.health, found.absent) == ("slow", ())


# -- wedged ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", MEETINGS)
@pytest.mark.parametrize("away", AWAY)
def test_a_rank_that_does_not_come_wedges_the_others(phase: CorePhase, away: CorePhase) -> None:
    """The one that stands is the victim; the one that is elsewhere is named."""
    found = watchdog(status("idle"), status(phase, 10_001), status(away, 7_000)).diagnose(0.0)
    assert (found.health, found.absent) == ("wedged", (0, 2))


def test_ranks_in_different_collectives_are_wedged() -> None:
    """Each waits for ever for the other: one in the all-reduce, one in the resume barrier."""
    found = watchdog(status("barrier", 11_000), status("sync", 12_500)).diagnose(0.0)
    assert (found.health, found.absent) == ("wedged", (0,))
    assert "rank 0 (e0) has been in the resume barrier (barrier) for 11.0 s" in found.text
    assert "rank 1 (e1) has been in the all-reduce (sync) for 12.5 s" in found.text


def test_all_in_the_same_collective_for_very_long_are_wedged_too() -> None:
    """A collective that everybody has entered does not take a minute: a network that is gone."""
    found = watchdog(status("sync", 60_001), status("sync", 60_000)).diagnose(0.0)
    assert (found.health, found.absent) == ("wedged", ())


def test_the_words_say_who_is_where_since_when_and_who_is_missing() -> None:
    """Rank, peer, phase, seconds, step and wave of each; figure 5, in one line."""
    dog = watchdog(
        status("sync", 12_000, step=17, wave=4),
        status("idle", 11_500, step=16, wave=3),
        status("sync", 11_900, step=17, wave=4),
    )
    assert dog.diagnose(0.0).text == (
        "rank 0 (e0) has been in the all-reduce (sync) for 12.0 s, step 17, wave 4; "
        "rank 2 (e2) has been in the all-reduce (sync) for 11.9 s, step 17, wave 4; "
        "rank 1 (e1) has been idle for 11.5 s, step 16, wave 3: absent"
    )


def test_a_rank_between_its_steps_is_told_as_such() -> None:
    """It has work, and is in no collective."""
    text = watchdog(status("step", 3_000), status("work", 2_500)).diagnose(0.0).text
    assert "rank 1 (e1) has been between steps for 2.5 s" in text


# -- time ------------------------------------------------------------------------------


def test_time_goes_on_between_two_pages() -> None:
    """What a rank said is as old as the page, and what has passed since."""
    dog = watchdog(status("sync", 500), status("idle"), now_ms=1_000.0)
    assert dog.diagnose(2_500.0) == Diagnosis("ok")
    assert dog.diagnose(2_501.0).health == "slow"
    for now_ms in (6_000.0, 10_500.0, 10_501.0):
        dog.report(0, "e0", status("sync", now_ms - 500), now_ms)
        dog.report(1, "e1", status("idle", now_ms - 1_000), now_ms)
        assert dog.diagnose(now_ms).health == ("slow" if now_ms < 10_501 else "wedged")


def test_a_rank_that_moves_on_is_well_again() -> None:
    """By its next page."""
    dog = watchdog(status("sync", 30_000), status("idle"))
    assert dog.diagnose(0.0).health == "wedged"
    dog.report(0, "e0", status("sync", 10), 1_000.0)
    assert dog.diagnose(1_000.0) == Diagnosis("ok")


# -- unknown ---------------------------------------------------------------------------


def test_without_a_page_of_every_rank_nothing_is_told() -> None:
    """A rank that never told, or whose engine has no page: the others' are not judged."""
    dog = watchdog(status("sync", 99_000), status(""), size=4)
    assert dog.diagnose(0.0) == Diagnosis("unknown", "no status page of rank 1, 2, 3")


def test_a_large_group_without_pages_is_described_in_short() -> None:
    """What it costs to look at it depends on the ranks that are there."""
    dog = watchdog(status("sync"), size=4096)
    first = ", ".join(map(str, range(1, 9)))
    text = f"no status page of rank {first} and 4087 more"
    assert dog.diagnose(0.0) == Diagnosis("unknown", text)


def test_an_old_page_says_nothing_of_the_present() -> None:
    """A sidecar that lives and tells no more, or too late, must not make its group wedged."""
    dog = watchdog(status("step", 100), status("idle", 100))
    assert dog.diagnose(5_000.0).health == "slow"
    dog.report(1, "e1", status("idle", 5_100), 5_000.0)
    found = dog.diagnose(5_001.0)
    assert found == Diagnosis("unknown", "rank 0 (e0) has sent no status for 5.0 s")
    assert dog.diagnose(60_000.0).health == "unknown"


# -- down ------------------------------------------------------------------------------


def test_a_lost_rank_takes_its_group_down_whatever_the_others_say() -> None:
    """It is named with the reason, and since when."""
    dog = watchdog(status("step"), status("idle"))
    dog.on_rank_lost(1, "e1", "e1 was not heard for 5000 ms", 1_000.0)
    dog.report(0, "e0", status("idle", 99_000), 3_500.0)
    assert dog.diagnose(3_500.0) == Diagnosis(
        "down",
        "rank 1 (e1) has been gone for 2.5 s: e1 was not heard for 5000 ms; "
        "all 2 ranks restart together",
        (1,),
    )


@pytest.mark.parametrize("phase", MEETINGS)
def test_who_is_left_of_a_group_and_waits_for_the_lost_one_is_stuck(phase: CorePhase) -> None:
    """Not before the limit: a rank whose link broke may be back by then."""
    dog = watchdog(status("step"), status(phase, 8_000))
    dog.on_rank_lost(0, "e0", "e0 was not heard for 5000 ms", 0.0)
    assert not dog.diagnose(2_000.0).stuck
    found = dog.diagnose(2_001.0)
    assert (found.health, found.absent, found.stuck) == ("down", (0,), True)
    assert "rank 1 (e1) has been in the" in found.text


def test_a_wedged_group_is_stuck_and_a_slow_one_is_not() -> None:
    assert watchdog(status("sync", 10_001), status("idle")).diagnose(0.0).stuck
    assert not watchdog(status("sync", 10_000), status("idle")).diagnose(0.0).stuck


# -- an engine that steps alone --------------------------------------------------------


@pytest.mark.parametrize("phase", [*MEETINGS, "work"])
def test_an_engine_stands_still_when_its_page_does(phase: CorePhase) -> None:
    """For longer than it may take; one that is idle, or has no page, does not."""
    told = describe_stall(status(phase, 500.0), 1_000.0, 2_000.0, 1_499.0)
    assert told == f"its core has been in `{phase}` for 1.5 s, step 40"
    assert describe_stall(status(phase, 500.0), 1_000.0, 2_000.0, 1_500.0) == ""
    assert describe_stall(status("idle", 10**9), 0.0, 0.0, 1.0) == ""
    assert describe_stall(status("", 10**9), 0.0, 0.0, 1.0) == ""
    assert describe_stall(None, 0.0, 0.0, 1.0) == ""


def test_every_lost_rank_is_named() -> None:
    """In the order of the ranks."""
    dog = watchdog(status("step"), status("idle"), status("idle"))
    dog.on_rank_lost(2, "e2", "left", 0.0)
    dog.on_rank_lost(0, "e0", "killed", 0.0)
    found = dog.diagnose(0.0)
    assert found.absent == (0, 2)
    assert found.text.index("rank 0 (e0)") < found.text.index("rank 2 (e2)")


def test_of_a_new_life_only_new_pages_count() -> None:
    """What the old ranks said is void."""
    dog = watchdog(status("sync", 99_000), status("idle"))
    dog.on_rank_lost(1, "e1", "left", 0.0)
    dog.whole()
    assert dog.diagnose(0.0) == Diagnosis("unknown", "no status page of rank 0, 1")
