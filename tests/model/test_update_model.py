"""The weight update, with engines that fail and die in the middle of it: never mixed
weights, each chunk once and in order, versions that only grow."""

from __future__ import annotations

from tests.model._play import Play, play_all, reached, schedules

KINDS = [
    "update",
    "update",
    "update",
    "at update opening",
    "at update arming",
    "at update armed",
    "at update starting",
    "at update loading",
    "at update unsent",
    "at update unsent",
    "at update finishing",
    "at update finished",
    "at update committing",
    "kill",
    "restart",
    "cut",
    "heal",
    "fail",
    "fail",
    "fail_load",
    "slow",
    "garble",
    "update_in_pause",
    "hasty",
    "wrong_digest",
    "leave",
    "kill_trainer",
    "leave_trainer",
    "new_trainer",
    "silence",
    "forge",
    "ghost",
]


def test_weights_are_never_mixed_and_versions_only_grow() -> None:
    """Every invariant after every event, in every schedule; and the states were reached."""
    reach = play_all(300, schedules(KINDS, most=9), Play)
    reached(
        reach,
        {
            "committed": 300,
            "started beside late engines": 10,
            "engine committed": 600,
            "quarantined at the end": 20,
            "freed by a whole update": 20,
            "abort partial": 30,
            "abort restored": 10,
            "abort untouched": 30,
            "stopped at update arming": 10,
            "stopped at update loading": 20,
            "stopped at update unsent": 30,
            "trainer killed with a chunk unsent": 2,
            "chunk told before the last is sent": 1000,
            "chunk sent before it is told": 50,
            "chunk told again": 1000,
            "chunk sent again": 600,
            "sent while it is received": 800,
            "sent after it is received": 800,
            "sent again while it is loaded": 200,
            "sent, already applied": 15,
            "mismatch found": 10,
            "armed in a communicator": 200,
            "asked to arm a digest": 570,
            "lacked the manifest": 70,
            "refused transfer_closed": 30,
            "refused wrong_state": 30,
            "stopped at update finished": 5,
            "stopped at update committing": 5,
            "asked again and answered": 60,
            "lease expired": 5,
            "refused engine_failed": 10,
            "refused manifest_refused": 5,
            "refused quorum_missing": 5,
            "committed with a quorum of 2": 50,
            "frames dropped": 500,
            "frames duplicated": 500,
        },
    )
