"""A group's engines: who takes part, who came late, who is quarantined."""

from __future__ import annotations

import pytest

from bus.messages import NackCode, WaitEngines
from bus.protocol.refusal import Declined
from bus.protocol.roster import Roster
from tests.unit.bus._builders import facts, peer


def roster() -> Roster:
    """One engine alone, and a DP group of two."""
    engines = Roster("policy")
    engines.add(peer("e0", facts(dp_group="e0")), late=False)
    for rank in (0, 1):
        what = facts(dp_group="dp", dp_rank=rank, dp_size=2)
        engines.add(peer(f"r{rank}", what), late=False)
    return engines


def test_members_come_with_their_dp_groups() -> None:
    """Those that take part in what begins now."""
    assert roster().members() == {"e0": "e0", "r0": "dp", "r1": "dp"}


def test_late_ones_take_part_from_the_next_time() -> None:
    """They are there, and not members, until they are admitted."""
    engines = roster()
    engines.add(peer("late", facts(dp_group="late")), late=True)
    assert "late" in engines.engines
    assert "late" not in engines.members()
    assert engines.ready() == ["e0", "r0", "r1"]
    assert engines.admit_late()
    assert not engines.admit_late()
    assert "late" in engines.members()


def test_one_that_joins_again_is_not_late() -> None:
    """It was a member and stays one."""
    engines = roster()
    engines.add(peer("e0", facts(dp_group="e0")), late=True)
    assert "e0" in engines.ready()


def test_nobody_ever_there_and_nobody_left_are_two_refusals() -> None:
    """One is a wrong name, the other a dead group."""
    engines = Roster("policy")
    with pytest.raises(Declined) as declined:
        engines.members()
    assert declined.value.failure.code is NackCode.UNKNOWN_GROUP
    only_one = peer("e0", facts())
    engines.add(only_one, late=False)
    engines.remove(only_one)
    with pytest.raises(Declined) as declined:
        engines.members()
    assert declined.value.failure.code is NackCode.EMPTY_GROUP


def test_an_old_life_is_not_removed_twice() -> None:
    """Nor does it take the new one along."""
    engines = roster()
    old = engines.engines["e0"]
    engines.add(peer("e0", facts(dp_group="e0"), boot=2), late=False)
    assert not engines.remove(old)
    assert "e0" in engines.engines


def test_a_dp_group_that_lacks_a_rank_is_not_whole() -> None:
    """It takes part in nothing until it is; alone in its group, it is named."""
    engines = roster()
    assert set(engines.members()) == {"e0", "r0", "r1"}
    engines.remove(engines.engines["r1"])
    assert set(engines.members()) == {"e0"}
    assert engines.ready() == ["e0"]
    assert engines.ready_count() == 1
    assert engines.broken("r0")
    engines.remove(engines.engines["e0"])
    with pytest.raises(Declined, match="DP group dp has 1 of 2 ranks"):
        engines.members()
    engines.add(peer("r1", facts(dp_group="dp", dp_rank=1, dp_size=2)), late=False)
    assert set(engines.members()) == {"r0", "r1"}


def test_quarantine_holds_the_whole_dp_group() -> None:
    """Its ranks run or stand as one; engines of their own are nobody's ranks."""
    engines = roster()
    assert engines.staying() == frozenset()
    engines.quarantine("r1", "half-loaded")
    engines.quarantine("gone", "half-loaded")
    assert set(engines.quarantined) == {"r1"}
    assert engines.staying() == {"r0", "r1"}
    engines.committed(["r0", "r1"], 5)
    assert engines.staying() == frozenset()
    assert engines.engines["r1"].version == 5


def test_an_abort_says_whether_it_left_a_part() -> None:
    """Partial quarantines, anything else frees; who is not there is nothing."""
    engines = roster()
    assert engines.aborted("e0", "partial")
    assert "e0" in engines.quarantined
    assert not engines.aborted("e0", "restored")
    assert "e0" not in engines.quarantined
    assert not engines.aborted("gone", "partial")


def test_an_engine_knows_best_whether_it_holds_a_part() -> None:
    """Its heartbeat goes before what was guessed; in the middle of an update it can't tell."""
    engines = roster()
    engines.told("e0", "quarantined")
    engines.quarantine("r0", "it refused a chunk")
    engines.told("r0", "updating")
    assert engines.staying() == {"e0", "r0", "r1"}
    engines.told("r0", "paused")
    engines.told("e0", "running")
    assert engines.staying() == frozenset()


def test_one_that_joins_quarantined_is() -> None:
    """And one that joins otherwise is not any more."""
    engines = roster()
    engines.add(peer("e0", facts(dp_group="e0", phase="quarantined")), late=False)
    assert engines.staying() == {"e0"}
    engines.add(peer("e0", facts(dp_group="e0")), late=False)
    assert engines.staying() == frozenset()


def test_too_few_engines_are_named() -> None:
    """Those that are there."""
    failure = roster().too_few(WaitEngines(4, 1000))
    assert failure.code is NackCode.TIMEOUT
    assert "3 of 4" in failure.detail
    assert "e0, r0, r1" in failure.detail


def test_routes_are_of_those_that_are_there() -> None:
    """A name that is gone has none."""
    assert roster().routes(["e0", "gone", "r1"]) == (b"e0", b"r1")


def test_views_are_sorted_by_name() -> None:
    """Or of those that were asked for."""
    engines = roster()
    assert [view.name for view in engines.views(0.0)] == ["e0", "r0", "r1"]
    assert [view.name for view in engines.views(0.0, ["r1"])] == ["r1"]
