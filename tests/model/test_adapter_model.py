"""An adapter that was removed is in no engine that serves, however long it was away; and an engine
that was there keeps the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.operations import Finish, Restore
from tests.model._play import Play, Schedule, play_all, reached, schedules
from tests.sim.ground_truth import InvariantViolation

if TYPE_CHECKING:
    from collections import Counter

    from tests.sim.engine import SimEngine

# Without restarts of the broker: a new one may find that fewer than half have made a commit.
KINDS = [
    "remove",
    "remove",
    "remove",
    "fail_removal",
    "update",
    "update",
    "cut",
    "heal",
    "heal",
    "kill",
    "restart",
    "slow",
    "pause",
    "kill_trainer",
    "new_trainer",
]
NAMES = ("a", "b", "c", "d", "e", "f")


class Removes(Play):
    """All engines have the same adapters at first; one that restarts has none."""

    def __init__(self, schedule: Schedule, reach: Counter[str]) -> None:
        super().__init__(schedule, reach)
        for engine in self.world.engines.values():
            engine.truth.adapters = set(NAMES)
            engine.behaviour.fail_rate.pop(Restore, None)
        self.world.checks.append(self.check)

    def remove(self, _engine: SimEngine | None, index: int) -> None:
        if self.trainer.alive and not self.trainer.is_busy:
            self.trainer.run(self.trainer.remove(NAMES[index]))

    def fail_removal(self, engine: SimEngine | None, index: int) -> None:
        """One engine fails it, after it has removed the adapter in some of its workers."""
        if engine is not None:
            engine.behaviour.fail_next.add(Finish)
            self.remove(None, index)

    def check(self) -> None:
        """After every event."""
        committed = {
            outcome.version: outcome.update_id
            for trainer in self.world.trainers.values()
            for outcome in trainer.outcomes
            if outcome.what == "remove" and outcome.version
        }
        removed: dict[int, str] = {}
        for engine in self.world.engines.values():
            removed |= engine.truth.removals
        for engine in self.world.live_engines:
            truth = engine.truth
            gone = {removed[v] for v in committed if v <= truth.version and v in removed}
            if truth.running and not truth.closed and gone & truth.adapters:
                raise InvariantViolation(f"{engine.name} serves {gone & truth.adapters}, removed")

    def end(self) -> None:
        """Who has made each commit of its group has what was not removed."""
        super().end()
        self.check()
        for engine in self.world.live_engines:
            truth = engine.truth
            self.reach["adapters dropped"] += not truth.adapters
            self.reach["adapters kept"] += bool(truth.adapters)
        for trainer in self.world.trainers.values():
            for outcome in trainer.outcomes:
                if outcome.what == "remove":
                    self.reach["removed"] += bool(outcome.version)
                    self.reach["removed, without some"] += bool(outcome.excluded)
                    self.reach["not removed"] += not outcome.version


def test_a_removed_adapter_never_comes_back() -> None:
    reach = play_all(300, schedules(KINDS, most=12), Removes)
    reached(
        reach,
        {
            "removed": 100,
            "removed, without some": 20,
            "not removed": 40,
            "adapters dropped": 100,
            "adapters kept": 100,
        },
    )
