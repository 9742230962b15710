"""Updates whose tensors come in parts, while engines fail, die and refuse between the parts: no
chunk is told of before all have checked its part, and no update lacks a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import Staging
from tests.model._play import Play, play_all, reached, schedules

if TYPE_CHECKING:
    from tests.sim.trainer import SimTrainer

KINDS = [
    *("update_parts", "update_parts", "update_parts", "update"),
    *("at update_parts loading", "at update_parts extending", "at update_parts extending"),
    *("at update_parts finishing", "at update_parts committing"),
    *("kill", "restart", "cut", "heal", "fail", "slow", "leave"),
    *("kill_trainer", "new_trainer", "silence", "ghost"),
]


class PartsPlay(Play):
    """Every other schedule is staged, where it can be."""

    def _add_trainer(self, name: str) -> SimTrainer:
        trainer = super()._add_trainer(name)
        if self.schedule.seed // 2 % 2:
            trainer.staging = Staging(required=False, budget_bytes=0, keep=False, clear_cache=True)
        return trainer


def test_no_chunk_of_an_unchecked_part_and_no_update_that_lacks_one() -> None:
    reach = play_all(200, schedules(KINDS, most=9, fail=3), PartsPlay)
    reached(
        reach,
        {
            "extended": 300,
            "a part missing": 40,
            "committed": 200,
            "stopped at update_parts extending": 20,
            "refused manifest_refused": 20,
            "refused engine_failed": 10,
            "armed in a communicator": 50,
        },
    )
