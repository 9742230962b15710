"""The two-phase pause, over bad networks and with everybody dying: paused is true,
a half-made pause is recovered forward, and nobody is left behind."""

from __future__ import annotations

from tests.model._play import Play, play_all, reached, schedules

KINDS = [
    "pause",
    "pause",
    "pause",
    "at pause local",
    "at pause global",
    "at pause global",
    "at pause paused",
    "at pause resuming",
    "kill",
    "restart",
    "leave",
    "cut",
    "heal",
    "fail",
    "fail_pause",
    "slow",
    "kill_trainer",
    "new_trainer",
    "cut_trainer",
    "heal_trainer",
    "silence",
    "forge",
    "ghost",
]


def test_the_pause_is_true_and_recovered_forward() -> None:
    """Every invariant after every event, in every schedule; and the states were reached."""
    reach = play_all(300, schedules(KINDS), Play)
    reached(
        reach,
        {
            "all paused": 300,
            "told paused": 300,
            "paused in one phase": 250,
            "recovered forward": 20,
            "stopped at pause local": 20,
            "stopped at pause global": 40,
            "stopped at pause paused": 20,
            "stopped at pause resuming": 10,
            "lease expired": 10,
            "asked again and answered": 40,
            "frames dropped": 500,
            "frames duplicated": 500,
            "engine restarted": 30,
            "trainer restarted": 10,
            "engine fenced": 10,
            "nack fenced": 10,
            "at rest without a trainer": 20,
        },
    )
