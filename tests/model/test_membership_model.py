"""Who is on the bus: names, lives, groups and epochs, with links cut, processes killed
and restarted under the same name, brokers restarted, and rivals that join."""

from __future__ import annotations

from tests.model._play import Play, play_all, reached, schedules

KINDS = [
    "kill",
    "restart",
    "restart",
    "leave",
    "cut",
    "cut",
    "heal",
    "heal",
    "twin",
    "rival",
    "kill_trainer",
    "leave_trainer",
    "new_trainer",
    "new_trainer",
    "cut_trainer",
    "heal_trainer",
    "restart_broker",
    "pause",
    "update",
    "forge",
    "ghost",
]


def test_one_name_is_one_process_and_one_group_has_one_holder() -> None:
    """Every invariant after every event, in every schedule; and the states were reached."""
    reach = play_all(250, schedules(KINDS, most=10, fail=0, longest_ms=3000), Play)
    reached(
        reach,
        {
            "peer gone": 100,
            "group taken": 250,
            "twin kept out": 30,
            "rival kept out": 20,
            "nack name_taken": 3,
            "nack group_held": 25,
            "nack not_joined": 10,
            "nack stale": 50,
            "nack fenced": 3,
            "engine fenced": 3,
            "engine rejoined": 20,
            "engine restarted": 60,
            "trainer restarted": 20,
            "broker restarted": 25,
            "committed": 200,
        },
    )
