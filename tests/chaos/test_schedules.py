"""Schedules of bad networks and dying processes, from numbers, in simulated time.

A schedule that fails prints what the brokers recorded, and can be played again by its number:
``WAVEBUS_CHAOS_SEED=17 pytest tests/chaos/test_schedules.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Final

from bus._journal.reader import Entry, read
from bus._journal.replay import Unplayable, replay_lives
from tests.model import _chaos
from tests.model._play import SHARE
from tests.model._schedules import play_all, told
from tests.sim.ground_truth import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

SCHEDULES: Final = max(1, int(int(os.environ.get("WAVEBUS_CHAOS_SCHEDULES", "350")) * SHARE))
SEED: Final = os.environ.get("WAVEBUS_CHAOS_SEED", "")
# Schedules that have found something, though few others did.
FOUND: Final = [2935, 6195, 7831, 9921, 13651, 14445, 15397, 15636, 20188, 21059, 42071]
FEW: Final = 500  # are not worth another process
# How often, in a thousand schedules. A third of the usual counts must be reached.
REACHED: Final = {
    "all paused": 2000,
    "told of a commit": 5000,
    "recovered forward": 80,
    "lease expired": 400,
    "said to be quarantined": 250,
    "freed by a whole update": 250,
    "engine restarted": 700,
    "engines never back": 100,
    "engine crashed while updating": 50,
    "engine crashed while paused": 30,
    "engine crashed while armed": 12,
    "engine stopped while updating": 20,
    "engine stopped while paused": 20,
    "cut up while updating": 20,
    "cut down while updating": 20,
    "cut up while paused": 8,
    "cut down while paused": 10,
    "peers parted": 700,
    "broker restarted": 250,
    "broker killed in pause paused": 30,
    "broker killed in update loading": 18,
    "broker stopped in pause paused": 20,
    "trainer killed in pause paused": 30,
    "trainer killed in update loading": 15,
    "trainer stopped in pause paused": 25,
    "trainer cut up in pause running": 40,
    "trainer cut down in pause running": 40,
    "trainer never back": 30,
    "frames dropped": 40_000,
    "frames duplicated": 16_000,
    "told of sleep": 90,
    "draft left partial by the model's": 25,
    "nack group_held": 300,
    "engine fenced": 40,
    "twin kept out": 120,
    "reports wait for an update": 150,
    "kept and started": 40,
    "request ended by length": 500,
    "lives replayed": 100,
}


def test_nothing_that_goes_wrong_is_forgotten(
    record_property: Callable[[str, object], None],
) -> None:
    """Every invariant after every event of every schedule; all heals when nothing goes wrong any
    more; and the states that matter were reached."""
    seeds = [int(SEED)] if SEED else list(range(SCHEDULES))
    reach, violations = play_all(seeds, apart=len(seeds) > FEW)
    record_property("schedules run", len(seeds))
    record_property("violations", len(violations))
    for each in violations[1:]:
        violations[0] += f"\n{each.splitlines()[0]}"
    assert not violations, violations[0]
    if SEED:
        return
    scale = len(seeds) / 1000 / 3
    missing = {key: reach[key] for key, least in REACHED.items() if reach[key] < int(least * scale)}
    assert not missing, f"reached too seldom: {missing}"


def test_what_was_found_once_is_not_found_again() -> None:
    """Whatever the number of schedules in this run."""
    _, violations = play_all(FOUND, apart=False)
    assert violations == []


def test_processes_find_the_same() -> None:
    """As one after the other would."""
    assert play_all([3, 4], block=1, apart=True) == play_all([3, 4], apart=False)


def test_a_schedule_that_fails_prints_its_journal_and_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's commits among it; and the same number fails in the same way."""

    def wrong(_play: _chaos.Chaos) -> None:
        raise InvariantViolation("this is how a violation is told")

    monkeypatch.setattr(_chaos.Chaos, "_check_said", wrong)
    first, again = (_chaos.play(seed, Counter()) for seed in (6, 6))
    assert first is not None
    assert again is not None
    text = told(first, tmp_path)
    assert told(again, tmp_path) == text
    assert "this is how a violation is told" in text
    path = tmp_path / "seed-6.journal"
    assert f"wavebus replay {path}" in text
    entries = [item for item in read(path) if isinstance(item, Entry)]
    assert len(entries) > 100
    assert len([text for text in first.lines if "COMMIT" in text]) > 0
    for each in replay_lives(entries):
        assert not isinstance(each, Unplayable)
        assert each[1].difference is None
