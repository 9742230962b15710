"""Sleep: engines that give their memory back in a pause, of both levels, with everybody dying
meanwhile. Nobody is resumed with memory or weights missing, or left asleep."""

from __future__ import annotations

from tests.model._play import Play, play_all, reached, schedules

KINDS = [
    "sleep",
    "sleep",
    "sleep",
    "sleep",
    "at sleep falling",
    "at sleep asleep",
    "at sleep asleep",
    "at sleep waking",
    "at sleep weights_awake",
    "at sleep weights_awake",
    "update",
    "pause",
    "kill",
    "restart",
    "leave",
    "cut",
    "heal",
    "fail",
    "fail_sleep",
    "slow",
    "kill_trainer",
    "leave_trainer",
    "new_trainer",
    "cut_trainer",
    "heal_trainer",
    "restart_broker",
    "silence",
    "forge",
    "ghost",
]


def test_who_sleeps_is_woken_and_serves_whole_weights() -> None:
    """Every invariant after every event, in every schedule; and the states were reached."""
    reach = play_all(500, schedules(KINDS, most=10), Play)
    reached(
        reach,
        {
            "committed": 300,
            "told of sleep": 225,
            "told of wake": 180,
            "woken by a resume": 600,
            "stopped at sleep falling": 30,
            "stopped at sleep asleep": 70,
            "stopped at sleep waking": 25,
            "stopped at sleep weights_awake": 50,
            "refused engine_asleep": 20,
            "refused engine_failed": 140,
            "freed by a whole update": 140,
            "quarantined at the end": 140,
            "broker restarted": 70,
            "trainer restarted": 110,
            "lease expired": 100,
            "trainer killed in sleep asleep": 3,
        },
    )
