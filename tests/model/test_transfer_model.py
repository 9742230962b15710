"""Trainers, engines and brokers come and go while transports are open: no engine reads, stages or
commits what another sender has left in its memory, and no version is two sets of weights."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from bus.messages import Nack, NackCode, Staging
from bus.operations import Open
from tests.model._play import Play, Schedule, play_all, reached, schedules

if TYPE_CHECKING:
    import random

    from tests.sim.engine import SimEngine
    from tests.sim.trainer import SimTrainer

KINDS = [
    *("update", "update", "update", "away", "away", "back", "back"),
    *("succeed", "succeed", "succeed_early", "reopen", "slow_opening", "missed", "missed"),
    *("restart", "rival", "at update arming", "at update loading"),
]


class TransferPlay(Play):
    """Engines get out of reach, and come back to another trainer or another transport."""

    def away(self, engine: SimEngine | None, index: int) -> None:
        """An engine is out of reach, for longer than the broker waits for it or not; it keeps the
        transport that it has."""
        if engine is not None and engine.alive:
            self._lost_rank(engine)
            self.world.network.cut(engine.route)
            self.world.run_for(2600.0 if index % 2 else 300.0)

    def back(self, _engine: SimEngine | None, index: int) -> None:
        """Whoever was out of reach is back."""
        for each in self.world.engines.values():
            self.world.network.heal(each.route)
        self.world.run_for(300.0 * index)

    def succeed(self, _engine: SimEngine | None, index: int) -> None:
        """The trainer goes, and another one updates whoever is in reach."""
        self._change_trainers(index)
        self.update(None, 0)
        self.world.run_for(400.0 * (index % 3))

    def succeed_early(self, _engine: SimEngine | None, index: int) -> None:
        """Another trainer joins a new broker before any engine does. So its epoch may be one that
        engines have seen with the trainer before it."""
        for each in self.world.live_engines:
            self._lost_rank(each)
            self.world.network.cut(each.route)
        seen = max((each.highest_epoch for each in self.world.live_engines), default=0)
        self.restart_broker(None, 0)
        self._change_trainers(index)
        self.back(None, 0)
        if self.world.run_until(self.world.has_joined, within_ms=8000.0):
            epoch = self.world.existing_group.epoch
            self.reach["another trainer under the same epoch"] += 0 < epoch == seen
            self.update(None, 0)
            self.world.run_for(400.0 * (index % 3))

    def _change_trainers(self, index: int) -> None:
        if self.trainer.alive:
            if index % 2:
                self.trainer.kill()
            else:
                self.trainer.leave()
        trainer = self.trainer = self._add_trainer(f"trainer{len(self.world.trainers)}")
        self.world.run_until(lambda: trainer.is_joined, within_ms=4000.0)
        self.reach["another trainer"] += 1

    def reopen(self, _engine: SimEngine | None, _index: int) -> None:
        """The trainer closes its transport, so that the next update opens it anew."""
        if self.trainer.alive and not self.trainer.is_busy:
            self.trainer.close_transport()
            self.update(None, 0)

    def missed(self, engine: SimEngine | None, index: int) -> None:
        """An engine is out of reach while another trainer, or the same one, opens a transport, and
        is back for the update after it."""
        self.away(engine, 1)
        if index % 2:
            self.succeed(None, index // 2)
        else:
            self.reopen(None, 0)
        self.world.run_until(lambda: not self.trainer.is_busy, within_ms=3000.0)
        self.back(None, 0)
        self.world.run_until(self.world.has_joined, within_ms=4000.0)
        self.update(None, 0)
        self.world.run_for(200.0 * index)

    def slow_opening(self, engine: SimEngine | None, index: int) -> None:
        """An engine takes longer to open its end than the broker waits for that, or nearly."""
        if engine is not None:
            engine.behaviour.slow_ms[Open] = 25_000.0 if index % 2 else 1500.0

    def end(self) -> None:
        for engine in self.world.engines.values():
            engine.behaviour.slow_ms.clear()
            openings = [each for each in engine.calls if isinstance(each, Open)]
            for before, after in pairwise(openings):
                boots = {each.params.partition(b"-")[0] for each in (before, after)}
                whose = "the same trainer's" if len(boots) == 1 else "another trainer's"
                self.reach[f"a transport replaced by {whose}"] += 1
            for sent in engine.sent:
                if isinstance(sent, Nack) and sent.code is NackCode.TRANSFER_CLOSED:
                    self.reach[f"not open at ARM: {sent.field}"] += 1
        super().end()
        self.watch.check_versions()  # also where several brokers gave them

    def _add_trainer(self, name: str) -> SimTrainer:
        trainer = super()._add_trainer(name)
        trainer.keep_last = self.schedule.seed // 64 % 4 == 0
        if self.schedule.seed // 128 % 2:
            trainer.staging = Staging(required=False, budget_bytes=0, keep=False, clear_cache=True)
        return trainer


def build(rng: random.Random) -> Schedule:
    """Longer schedules in which fewer calls fail."""
    return schedules(KINDS, most=14, fail=1)(rng)


def test_no_engine_reads_what_another_sender_has_left() -> None:
    """Every invariant after every event, and in the end one whole update brings all to one version,
    whichever transport an engine had open. :mod:`tests.sim.ground_truth` refuses a chunk that is
    received while another sender's memory is open."""
    reach = play_all(1000, build, TransferPlay)
    reached(
        reach,
        {
            "another trainer": 1800,
            "another trainer under the same epoch": 300,
            "a transport replaced by another trainer's": 3300,
            "a transport replaced by the same trainer's": 1500,
            "not open at ARM: transfer": 150,
            "not open at ARM: backend": 100,
            "refused transfer_closed": 680,
            "engine committed": 8000,
            "committed": 2700,
            "engine restarted": 400,
            "broker restarted": 300,
            "caught up": 40,
        },
    )
