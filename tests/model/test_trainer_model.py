"""Trainers that give an update up at any moment, as one whose task is cancelled, or which waits for
no answer any more: what was begun is undone, and the next update finds nothing in its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import Staging
from tests.model._play import Play, play_all, reached, schedules

if TYPE_CHECKING:
    from tests.sim.engine import SimEngine
    from tests.sim.trainer import SimTrainer

KINDS = [
    *("give_up",) * 12,
    *("give_up_soon", "give_up_soon", "update", "pause", "sleep", "at sleep asleep"),
    *("kill", "restart", "leave", "fail", "fail_load", "fail_sleep", "slow", "cut", "heal"),
    *("kill_trainer", "new_trainer", "cut_trainer", "heal_trainer", "restart_broker"),
]
POINTS = ("opening", "arming", "armed", "starting", "loading", "unsent", "finishing", "committing")


class GivesUp(Play):
    """Its trainers do, in the middle of an update; of some, updates are staged."""

    def give_up(self, engine: SimEngine | None, index: int) -> None:
        """When the broker is there."""
        self._wait_for(f"update {POINTS[(self.payload + 3 * index) % len(POINTS)]}")
        self.give_up_soon(engine, index)

    def give_up_soon(self, _engine: SimEngine | None, _index: int) -> None:
        """Whatever runs now."""
        trainer = self.trainer
        if trainer.can_give_up and trainer.updating is not None:
            self.reach[f"given up while {trainer.updating.state.value}"] += 1
            trainer.give_up()

    def _add_trainer(self, name: str) -> SimTrainer:
        trainer = super()._add_trainer(name)
        if self.schedule.seed // 32 % 3 == 0:
            trainer.staging = Staging(required=False, budget_bytes=0, keep=False, clear_cache=True)
        return trainer


def test_what_a_trainer_gives_up_is_undone() -> None:
    """Every invariant after every event, in every schedule; and the states were reached."""
    reach = play_all(300, schedules(KINDS, most=9), GivesUp)
    reached(
        reach,
        {
            "given up while idle": 80,
            "given up while arming": 90,
            "given up while starting": 55,
            "given up while loading": 25,
            "given up while committing": 35,
            "abort partial": 250,
            "abort restored": 150,
            "abort untouched": 680,
            "committed": 350,
            "freed by a whole update": 110,
        },
    )
