"""A whole group in simulated time, brought to the moment that a test is about."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from bus._protocol.group.pause import PauseState
from bus._protocol.group.sleep import SleepState
from bus._protocol.group.update import UpdateState
from bus.errors import Refused
from tests.sim.memory_network import Faults
from tests.sim.watch import Watch
from tests.sim.world import SimWorld

if TYPE_CHECKING:
    from bus.messages import Message, NackCode, Target
    from tests.sim.engine import SimEngine
    from tests.sim.scripts import Outcome

HONEST = Faults(delay_ms=1.0)


class Scene:
    """A world with engines that have joined, a trainer, and a watch over them."""

    def __init__(self, *sizes: int, trainer: bool = True, draft: bool = False) -> None:
        self.reach: Counter[str] = Counter()
        self.world = SimWorld(seed=3, faults=HONEST, draft=draft)
        self.watch = Watch(self.world, self.reach)
        for size in sizes:
            self.world.add_dp_group(size)
        if sizes:
            assert self.world.run_until(self.world.has_joined)
        if trainer:
            self.trainer = self.world.add_trainer()
            assert self.world.run_until(lambda: self.trainer.is_joined)

    def engine(self, name: str) -> SimEngine:
        return self.world.engines[name]

    def update(self, payload: int = 7, target: Target = "model") -> None:
        self.trainer.run(self.trainer.update(payload, target=target))

    def pause(self) -> None:
        self.trainer.run(self.trainer.pause(hold_ms=300.0))

    def until(self, state: PauseState | SleepState | UpdateState) -> None:
        """Stop in the moment in which the group is there."""
        kinds = {PauseState: "pause", SleepState: "sleep", UpdateState: "update"}
        kind = kinds[type(state)]
        group = self.world.existing_group
        assert self.world.run_until(lambda: getattr(group, kind).state is state), state

    def settled(self) -> Outcome:
        """How the trainer's script ended, with all at rest and nobody forgotten."""
        self.rest()
        return self.trainer.outcomes[-1]

    def rest(self) -> None:
        assert self.world.settle(within_ms=90_000.0)
        self.watch.check_end()
        self.watch.check_versions()

    def refused(self, *messages: Message) -> NackCode:
        """What the trainer is answered."""
        self.trainer.run(self.trainer.ask(*messages))
        assert self.world.run_until(lambda: not self.trainer.is_busy)
        error = self.trainer.outcomes[-1].error
        assert isinstance(error, Refused)
        return error.code

    def versions(self) -> dict[str, int]:
        return {e.name: e.truth.version for e in self.world.live_engines}

    def running(self) -> set[str]:
        return {e.name for e in self.world.live_engines if e.truth.running}


def code_of(outcome: Outcome) -> NackCode:
    assert isinstance(outcome.error, Refused), outcome
    return outcome.error.code
