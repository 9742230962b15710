"""Engines that live and answer nothing for longer than a step may take: they fall out alone, get no
requests, hold up no other update, and take part again when they answer. And trainers that live and
do not go on: their update ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._protocol.group.update import UpdateState
from tests.model._play import CALLS, Play, play_all, reached, schedules
from tests.sim.ground_truth import InvariantViolation

if TYPE_CHECKING:
    from collections import Counter

    from tests.model._play import Schedule
    from tests.sim.engine import SimEngine
    from tests.sim.trainer import SimTrainer

# Longer than the step's time of the simulated world, and shorter than twice that.
MUTE_MS = 30_000.0
STAND_MS = 45_000.0  # longer than twice
KINDS = ["update", "mute", "mute", "mute", "stand", "pause", "kill", "slow"]
POINTS = ("opening", "arming", "arming", "arming", "starting", "loading", "committing")


class Overdue(Play):
    """Sees to the engines that the broker calls overdue, after every event."""

    def __init__(self, schedule: Schedule, reach: Counter[str]) -> None:
        super().__init__(schedule, reach)
        self._overdue: set[str] = set()
        self._armed: set[str] = set()  # who is to meet in the communicator of this update
        self._seen = UpdateState.IDLE
        self.world.checks.append(self._check)

    def mute(self, engine: SimEngine | None, index: int) -> None:
        """In an update no call of it returns any more, for some time; its heart beats."""
        self._wait_for(f"update {POINTS[self.payload % len(POINTS)]}")
        if engine is None:
            return
        engine.behaviour.hold.update(CALLS)

        def speak() -> None:
            for kind in CALLS:
                engine.release(kind)

        self.world.scheduler.call_at(self.world.now_ms + MUTE_MS, speak)
        self.world.run_for(21_000.0 if index % 2 else 1000.0)

    def stand(self, _engine: SimEngine | None, _index: int) -> None:
        """The trainer begins an update, and takes longer for each step than it may."""
        if self.trainer.alive and not self.trainer.is_busy:
            self.payload += 1
            self.trainer.run(self.trainer.update(self.payload, think_ms=STAND_MS))

    def end(self) -> None:
        """Who answers again hears with its next heartbeat what its group serves by now."""
        self.world.heal()
        self.world.run_for(2000.0)
        super().end()

    def _add_trainer(self, name: str) -> SimTrainer:
        trainer = super()._add_trainer(name)
        trainer.quorum = 1  # with more, the loss of one may end the update of all
        return trainer

    def _check(self) -> None:
        group = self.world.group
        if group is None:
            return
        overdue = {name for name, peer in group.registry.engines.items() if peer.overdue}
        self.reach["overdue"] += len(overdue - self._overdue)
        state, members = group.update.state, set(group.update.members)
        routed = {route.engine for route in group.routing.now.engines}
        # While a commit is under way routes stay as they are.
        if state not in (UpdateState.COMMITTING, UpdateState.ABORTING) and routed & overdue:
            raise InvariantViolation(f"{routed & overdue} are routed, and have not answered")
        begins = state is not self._seen and self._seen is UpdateState.IDLE
        if begins and members & self._overdue & overdue:
            raise InvariantViolation(f"{members & overdue} take part, and have not answered")
        if state is not self._seen and self._seen is UpdateState.COMMITTING:
            self.reach["committed without the overdue"] += bool(overdue)
        left = members - set(group.update.excluded)
        if state is UpdateState.ARMING and group.update.barrier is not None:
            if getattr(group.update.barrier.messages[0], "communicator", 0):
                self._armed = self._armed or left
        elif state is UpdateState.IDLE:
            self._armed = set()
        elif state is UpdateState.LOADING and self._armed - left:
            raise InvariantViolation(f"the collective lacks {self._armed - left}")
        failure = group.update.failure
        if (
            state is UpdateState.ABORTING
            and self._seen in (UpdateState.ARMING, UpdateState.STARTING)
            and failure is not None
            and failure.peer in overdue
            and not self._armed
            and left - set(group.registry.dp_peers(failure.peer))
        ):
            raise InvariantViolation(f"the update of {left} ends for {failure.peer}")
        self._overdue, self._seen = overdue, state


def test_who_does_not_answer_holds_up_one_step_and_nobody_else() -> None:
    reach = play_all(150, schedules(KINDS, most=6, fail=0, longest_ms=9000), Overdue)
    reached(reach, {"overdue": 72, "committed without the overdue": 22, "committed": 238})
