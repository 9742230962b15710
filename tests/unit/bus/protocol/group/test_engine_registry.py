"""A group's engines: who takes part, who came late, who is quarantined."""

from __future__ import annotations

import pytest

from bus._protocol.core.failures import Declined
from bus._protocol.group.engine_registry import PENDING_BEATS, EngineRegistry
from bus.messages import NackCode
from tests.unit.bus._builders import facts, peer


def roster() -> EngineRegistry:
    """One engine alone, and a DP group of two."""
    engines = EngineRegistry("policy")
    engines.add(peer("e0", facts(dp_group="e0")), joined_late=False)
    for rank in (0, 1):
        what = facts(dp_group="dp", dp_rank=rank, dp_size=2)
        engines.add(peer(f"r{rank}", what), joined_late=False)
    return engines


def test_members_come_with_their_dp_groups() -> None:
    """Those that take part in what begins now."""
    assert roster().members() == {"e0": "e0", "r0": "dp", "r1": "dp"}


def test_late_ones_take_part_from_the_next_time() -> None:
    """They are there, and not members, until they are admitted."""
    engines = roster()
    engines.add(peer("late", facts(dp_group="late")), joined_late=True)
    assert "late" in engines.engines
    assert "late" not in engines.members()
    assert engines.ready() == ["e0", "r0", "r1"]
    assert engines.admit_joined_late()
    assert not engines.admit_joined_late()
    assert "late" in engines.members()


def test_one_that_joins_again_is_not_late() -> None:
    """It was a member and stays one."""
    engines = roster()
    engines.add(peer("e0", facts(dp_group="e0")), joined_late=True)
    assert "e0" in engines.ready()


def test_nobody_ever_there_and_nobody_left_are_two_refusals() -> None:
    """One is a wrong name, the other a dead group."""
    engines = EngineRegistry("policy")
    with pytest.raises(Declined) as declined:
        engines.members()
    assert declined.value.failure.code is NackCode.UNKNOWN_GROUP
    only_one = peer("e0", facts())
    engines.add(only_one, joined_late=False)
    engines.remove(only_one, "gone")
    with pytest.raises(Declined) as declined:
        engines.members()
    assert declined.value.failure.code is NackCode.EMPTY_GROUP


def test_an_old_life_is_not_removed_twice() -> None:
    """Nor does it take the new one along."""
    engines = roster()
    old = engines.engines["e0"]
    engines.add(peer("e0", facts(dp_group="e0"), boot=2), joined_late=False)
    assert not engines.remove(old, "gone")
    assert "e0" in engines.engines


def test_a_dp_group_that_lacks_a_rank_is_not_whole() -> None:
    """It takes part in nothing until it is; alone in its group, it is named."""
    engines = roster()
    assert set(engines.members()) == {"e0", "r0", "r1"}
    engines.remove(engines.engines["r1"], "gone")
    assert set(engines.members()) == {"e0"}
    assert engines.ready() == ["e0"]
    assert engines.is_incomplete("r0")
    engines.remove(engines.engines["e0"], "gone")
    with pytest.raises(Declined, match="DP group dp has 1 of 2 ranks"):
        engines.members()
    engines.add(peer("r1", facts(dp_group="dp", dp_rank=1, dp_size=2)), joined_late=False)
    assert set(engines.members()) == {"r0", "r1"}


def test_who_is_left_out_is_known_by_name() -> None:
    """All ranks that are there, of each DP group that lacks one; engines alone never are."""
    engines = roster()
    assert engines.unable() == set()
    for rank in (0, 2):
        engines.add(
            peer(f"s{rank}", facts(dp_group="s", dp_rank=rank, dp_size=3)), joined_late=False
        )
    engines.remove(engines.engines["r0"], "gone")
    assert engines.unable() == {"r1", "s0", "s2"}
    assert not engines.is_incomplete("e0")
    engines.add(peer("s1", facts(dp_group="s", dp_rank=1, dp_size=3)), joined_late=False)
    assert engines.unable() == {"r1"}
    assert engines.ready() == ["e0", "s0", "s1", "s2"]
    engines.remove(engines.engines["r1"], "gone")
    assert engines.unable() == set()


def test_peers_are_the_ranks_that_are_there() -> None:
    """Itself among them; an engine alone has none but itself."""
    engines = roster()
    assert engines.dp_peers("r1") == ["r0", "r1"]
    assert engines.dp_peers("e0") == ["e0"]
    engines.remove(engines.engines["r0"], "gone")
    assert engines.dp_peers("r1") == ["r1"]


def test_a_pause_that_is_pending_for_some_beats_while_a_peer_runs_is_half_made() -> None:
    """Not at once: a pause that somebody asked completes by itself."""
    engines = roster()
    engines.engines["r1"].phase = "pausing"
    for _ in range(PENDING_BEATS):
        engines.on_phase("r1", "pausing")
        assert not engines.is_still_pausing("r1")
    engines.on_phase("r1", "pausing")
    assert engines.is_still_pausing("r1")
    engines.engines["r0"].phase = "paused"
    assert not engines.is_still_pausing("r1")  # nobody runs: it completes
    engines.engines["r0"].phase = "running"
    engines.on_phase("r1", "running")
    engines.on_phase("r1", "pausing")
    assert not engines.is_still_pausing("r1")  # in a row


def test_an_engine_alone_is_never_half_paused() -> None:
    """It waits for nobody."""
    engines = roster()
    engines.engines["e0"].phase = "pausing"
    for _ in range(10):
        engines.on_phase("e0", "pausing")
    assert not engines.is_still_pausing("e0")


def test_beats_are_counted_anew_in_another_life() -> None:
    """What the one before said is nothing of this one's."""
    engines = roster()
    for _ in range(PENDING_BEATS + 1):
        engines.on_phase("r1", "pausing")
    assert engines.is_still_pausing("r1")
    engines.remove(engines.engines["r1"], "gone")
    what = facts(dp_group="dp", dp_rank=1, dp_size=2, phase="pausing")
    engines.add(peer("r1", what, boot=2), joined_late=False)
    engines.on_phase("r1", "pausing")
    assert not engines.is_still_pausing("r1")


def test_quarantine_holds_the_whole_dp_group() -> None:
    """Its ranks run or stand as one; engines of their own are nobody's ranks."""
    engines = roster()
    assert engines.kept_paused() == frozenset()
    engines.quarantine("r1", "half-loaded")
    engines.quarantine("gone", "half-loaded")
    assert set(engines.quarantined) == {"r1"}
    assert engines.kept_paused() == {"r0", "r1"}
    engines.on_committed(["r0", "r1"], 5, set(), "model")
    assert engines.kept_paused() == frozenset()
    assert engines.engines["r1"].version == 5


def test_an_abort_says_whether_it_left_a_part() -> None:
    """Partial quarantines, anything else frees; who is not there is nothing."""
    engines = roster()
    assert engines.on_abort_ack("e0", "partial")
    assert "e0" in engines.quarantined
    assert engines.on_abort_ack("e0", "partial")  # as before, or by its heartbeat: it is told
    assert not engines.on_abort_ack("e0", "restored")
    assert "e0" not in engines.quarantined
    assert not engines.on_abort_ack("gone", "partial")


def test_an_engine_knows_best_whether_it_holds_a_part() -> None:
    """Its heartbeat goes before what was guessed; in the middle of an update it can't tell."""
    engines = roster()
    engines.on_phase("e0", "quarantined")
    engines.quarantine("r0", "it refused a chunk")
    engines.on_phase("r0", "updating")
    assert engines.kept_paused() == {"e0", "r0", "r1"}
    engines.on_phase("r0", "paused")
    engines.on_phase("e0", "running")
    assert engines.kept_paused() == frozenset()


def test_one_that_joins_quarantined_is() -> None:
    """And one that joins otherwise is not any more."""
    engines = roster()
    engines.add(peer("e0", facts(dp_group="e0", phase="quarantined")), joined_late=False)
    assert engines.kept_paused() == {"e0"}
    engines.add(peer("e0", facts(dp_group="e0")), joined_late=False)
    assert engines.kept_paused() == frozenset()


def test_who_is_overdue_takes_no_part_in_what_begins() -> None:
    """Nor do the ranks of its DP group; it stays as it is, and is named if nobody else is there."""
    engines = roster()
    engines.engines["r1"].overdue = "arm"
    assert engines.unable() == {"r0", "r1"}
    assert engines.kept_paused() == {"r0", "r1"}
    assert engines.ready() == ["e0"]
    assert set(engines.members()) == {"e0"}
    engines.remove(engines.engines["e0"], "gone")
    with pytest.raises(Declined, match="r1 has not answered arm yet"):
        engines.members()


def test_routes_are_of_those_that_are_there() -> None:
    """A name that is gone has none."""
    assert roster().routes(["e0", "gone", "r1"]) == (b"e0", b"r1")


def test_views_are_sorted_by_name() -> None:
    """Or of those that were asked for."""
    engines = roster()
    assert [view.name for view in engines.views(0.0)] == ["e0", "r0", "r1"]
    assert [view.name for view in engines.views(0.0, ["r1"])] == ["r1"]
