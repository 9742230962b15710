"""Two models in every engine, each updated by itself: a part of one is mended by a whole update of
that one, and by nothing else; a version means one set of the model's weights."""

from __future__ import annotations

from bus.errors import Refused
from tests.model._play import SETTLE_MS, Play, play_all, reached, schedules

KINDS = [
    "update",
    "update",
    "update_draft",
    "update_draft",
    "update_draft",
    "fail_draft_load",
    "fail_draft_load",
    "fail_load",
    "at update_draft armed",
    "at update_draft loading",
    "at update_draft finished",
    "at update loading",
    "sleep",
    "at sleep asleep",
    "pause",
    "kill",
    "restart",
    "fail",
    "slow",
    "kill_trainer",
    "new_trainer",
    "restart_broker",
    "silence",
]


class WithDrafts(Play):
    """Engines have a draft model."""

    draft = True

    def last_update(self) -> None:
        """In every other schedule a draft's before the model's: of engines that came back with
        other weights, it is refused."""
        if self.schedule.seed % 2:
            self._draft_first()
        super().last_update()

    def _draft_first(self) -> None:
        assert self.world.run_until(self.world.has_joined, within_ms=SETTLE_MS), self.story()
        self.update_draft(None, 0)
        assert self.world.settle(within_ms=SETTLE_MS), self.story()
        error = self.trainer.outcomes[-1].error
        behind = isinstance(error, Refused) and error.nack.field == "target"
        self.reach["refused a draft before its model"] += behind


def test_a_part_is_mended_by_a_whole_of_the_same_model() -> None:
    """Every invariant after every event, in every schedule; and the states were reached."""
    reach = play_all(350, schedules(KINDS, most=10), WithDrafts)
    reached(
        reach,
        {
            "committed": 600,
            "engine committed": 2000,
            "engine committed, partial still": 100,
            "draft left partial by the model's": 40,
            "freed by a whole update": 70,
            "abort partial": 300,
            "refused wrong_state": 100,
            "refused empty_group": 120,
            "stopped at update_draft armed": 30,
            "stopped at update_draft loading": 30,
            "stopped at update_draft finished": 8,
            "refused a draft before its model": 12,
            "told of sleep": 35,
            "broker restarted": 30,
        },
    )
