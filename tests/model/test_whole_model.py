"""Everything at once: pauses and updates of groups of up to six engines while anything
is cut, killed, restarted, slow, failing or lost, the broker too."""

from __future__ import annotations

from tests.model._play import Play, play_all, reached, schedules

KINDS = [
    "update",
    "update",
    "update",
    "pause",
    "at pause local",
    "at pause global",
    "at pause paused",
    "at update arming",
    "at update loading",
    "at update unsent",
    "at update finished",
    "at update committing",
    "kill",
    "restart",
    "leave",
    "cut",
    "heal",
    "fail",
    "slow",
    "garble",
    "hasty",
    "kill_trainer",
    "leave_trainer",
    "new_trainer",
    "cut_trainer",
    "heal_trainer",
    "restart_broker",
    "silence",
    "twin",
    "rival",
    "forge",
    "ghost",
]


def test_a_group_comes_back_from_anything() -> None:
    """Every invariant after every event; healed, all that was asked is answered, nobody is
    left paused but the quarantined, and one whole update brings all to one version."""
    reach = play_all(350, schedules(KINDS, most=12), Play)
    reached(
        reach,
        {
            "all paused": 400,
            "recovered forward": 10,
            "committed": 350,
            "quarantined at the end": 15,
            "freed by a whole update": 15,
            "lease expired": 5,
            "engine fenced": 10,
            "nack fenced": 20,
            "engine restarted": 60,
            "broker restarted": 50,
            "trainer restarted": 40,
            "asked again and answered": 60,
            "twin kept out": 30,
            "rival kept out": 20,
            "at rest without a trainer": 40,
            "abort partial": 15,
            "abort restored": 5,
            "stopped at update unsent": 10,
            "chunk told before the last is sent": 1000,
            "chunk sent before it is told": 30,
            "mismatch found": 5,
            "armed in a communicator": 200,
            "refused transfer_closed": 30,
        },
    )
