"""Schedules in which anything goes wrong at any moment: networks that get worse and better and
part, one way, too; processes that are killed between two sends, or stopped, and come back late
or never. The ranks of a DP group die and come back together, as their supervisor has it.
"""

from __future__ import annotations

import contextlib
import random
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bus._journal.records import MAGIC
from bus._journal.render import line
from bus._journal.replay import Unplayable, replay_lives
from bus._protocol.core.link import LinkState
from bus._protocol.group.catch_up import stale_dp_groups
from bus.messages import Staging
from tests.model import test_wave_model as waves
from tests.model._play import Action, Play, Schedule
from tests.model.test_whole_model import KINDS as WHOLE_KINDS
from tests.sim.ground_truth import InvariantViolation
from tests.sim.memory_network import Faults
from tests.sim.process import Died

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tests.sim.engine import SimEngine
    from tests.sim.trainer import SimTrainer
    from tests.sim.world import SimWorld

LOCKSTEP: Final = 4  # of five schedules, the last one
SIZES: Final = (
    (1,),
    (1, 1),
    (2,),
    (1, 2),
    (3,),
    (2, 2),
    (4,),
    (1, 3),
    (2, 1, 3),
    (1, 4),
    (2, 4),
    (1,) * 6,
)
# Single ranks of a DP group don't die, or leave: the whole model has those.
_LEFT_OUT: Final = {"kill", "restart", "leave", "kill_trainer", "restart_broker", "heal"}
KINDS: Final = [
    *(kind for kind in WHOLE_KINDS if kind not in _LEFT_OUT),
    *("update", "update", "update", "sleep", "at sleep asleep", "at update starting"),
    *("crash", "crash", "crash", "crash_trainer", "crash_trainer", "crash_broker", "crash_broker"),
    *("one_way", "one_way", "one_way_trainer", "part", "part", "join", "join", "weather"),
    *("stop", "stop", "stop_trainer", "stop_broker"),
]
DRAFT_KINDS: Final = ["update_draft", "update_draft", "at update_draft loading", "fail_draft_load"]
NEVER: Final = -1.0
# From the least to what is longer than a lease.
AWAY_MS: Final = (0.0, 400.0, 2500.0, 9000.0)
WEATHER: Final = (
    Faults(delay_ms=1.0),
    Faults(drop=0.1, delay_ms=1.0, jitter_ms=40.0, reorder=True),
    Faults(drop=0.3, duplicate=0.3, delay_ms=1.0, jitter_ms=10.0, reorder=True),
    Faults(duplicate=0.5, delay_ms=100.0, jitter_ms=300.0, reorder=True),
    Faults(delay_ms=700.0, jitter_ms=100.0),
    Faults(drop=0.6, delay_ms=1.0),
)
# After the last fault everybody runs again within this: a lost peer is missed, a name that is
# held is tried for again, a lease ends, and a step that nobody acks is given up, once each.
HEALS_MS: Final = 60_000.0


@dataclass(frozen=True)
class ChaosSchedule(Schedule):
    """``draft``: engines have a draft model, which is updated, too; ``keep_last``: the trainer
    keeps its last weights, and whoever is behind catches up; ``staged``: updates are, where they
    can be."""

    draft: bool = False
    keep_last: bool = False
    staged: bool = False


def chaos(seed: int) -> ChaosSchedule:
    """The schedule of this number."""
    rng = random.Random(seed)
    draft = rng.random() < 0.25
    kinds = [*KINDS, *(DRAFT_KINDS if draft else ())]
    actions = [
        Action(
            rng.randint(0, rng.choice([20, 60, 900, 3000])), rng.choice(kinds), rng.randint(0, 23)
        )
        for _ in range(rng.randint(3, 18))
    ]
    made = ChaosSchedule(
        seed=rng.randrange(2**32),
        sizes=rng.choice(SIZES),
        drop=rng.choice([0, 0, 2, 10]),
        duplicate=rng.choice([0, 5, 20]),
        jitter_ms=rng.choice([0, 5, 40]),
        reorder=rng.random() < 0.5,
        slow_ms=rng.choice([5, 40, 200]),
        fail=rng.choice([0, 0, 2, 5]),
        actions=tuple(actions),
        draft=draft,
        keep_last=rng.random() < 0.4,
        staged=rng.random() < 0.5,
    )
    if not made.keep_last:
        return made
    first = [Action(rng.randint(0, 900), "update", 0) for _ in range(2)]  # of which it keeps one
    return replace(made, actions=(*first, *actions))


class Chaos(Play):
    """One such schedule, played; what happens is told in ``told``."""

    schedule: ChaosSchedule

    def __init__(self, schedule: ChaosSchedule, reach: Counter[str]) -> None:
        self.draft = schedule.draft
        super().__init__(schedule, reach)
        self.told: list[tuple[float, str]] = []
        self._random = random.Random(schedule.seed + 1)
        self._never: set[str] = set()
        self._due: list[Callable[[], None]] = []  # what is to happen later
        self.world.checks.append(self._check_dp_groups)

    def act(self, action: Action) -> None:
        self._tell(f"{action.what} {action.index}")
        with contextlib.suppress(Died):  # of somebody who was about to, and was made to send
            super().act(action)

    def end(self) -> None:
        """Nothing goes wrong any more; who is not gone for good, is back; all run again."""
        world = self.world
        self._tell("all is well from now on")
        for process in world.processes():
            process.cancel_death()
        while self._due:  # who was to die, is dead; who was to come back, is back
            self._due.pop(0)()
        world.heal()
        self._bring_back()
        assert world.settle(within_ms=HEALS_MS), f"not at rest after {HEALS_MS} ms: {self.story()}"
        self.watch.check_end()
        self._check_caught_up()
        self._check_said()
        if self.trainer.peer.link.state is LinkState.REFUSED:
            self.trainer.leave()  # another one held the group for longer than its patience
        if not self.trainer.alive:
            self.reach["at rest without a trainer"] += 1
            self.new_trainer(None, 0)
        if world.live_engines:
            assert world.run_until(self._all_known, within_ms=HEALS_MS), self.story()
            self.last_update()
        self.watch.count_end()
        if self.brokers == 1:
            self.watch.check_versions()

    # -- actions ------------------------------------------------------------------------

    def crash(self, engine: SimEngine | None, index: int) -> None:
        """A rank is killed, at once or after some sends; its DP group goes with it."""
        if engine is None or not engine.alive:
            return
        back_ms = self._away(index)
        if back_ms == NEVER and not self._others(engine):
            back_ms = 0.0
        self._phase("engine crashed", engine)
        self._dies_after(engine, index // 4, lambda: self._group_dies(engine, back_ms))

    def crash_trainer(self, _engine: SimEngine | None, index: int) -> None:
        trainer = self.trainer
        if not trainer.alive:
            return
        back_ms = self._away(index)

        def back() -> None:
            if self.trainer is trainer:
                self.new_trainer(None, index)

        def dies() -> None:
            if not trainer.alive:
                return
            self._tell(f"{trainer.name} is killed")
            self._trainer_phase("trainer killed")
            trainer.kill()
            if back_ms == NEVER:
                self.reach["trainer never back"] += 1
            else:
                self._later(back_ms, back)

        if index // 4:
            trainer.process.die_after(index // 4, dies)
        else:
            dies()

    def crash_broker(self, _engine: SimEngine | None, index: int) -> None:
        process = self.world.broker_process
        back_ms = AWAY_MS[index % 4]

        def dies() -> None:
            if not process.alive:
                return
            self._tell("the broker is killed")
            self._broker_phase("broker killed")
            self.world.kill_broker()
            self.brokers += 1
            self._part_all()
            self._later(back_ms, self._broker_back)

        if index // 4:
            process.die_after(index // 4, dies)
        else:
            dies()

    def one_way(self, engine: SimEngine | None, index: int) -> None:
        """Frames pass between an engine and the broker in one direction only."""
        if engine is not None:
            self._lost_rank(engine)
            way = "up" if index % 2 else "down"
            self._phase(f"cut {way}", engine)
            self.world.network.cut(engine.route, up=index % 2 == 1, down=index % 2 == 0)

    def one_way_trainer(self, _engine: SimEngine | None, index: int) -> None:
        self._trainer_phase("trainer cut up" if index % 2 else "trainer cut down")
        self.world.network.cut(self.trainer.route, up=index % 2 == 1, down=index % 2 == 0)

    def part(self, _engine: SimEngine | None, index: int) -> None:
        """Some peers are on the other side, one way or both."""
        routes = [each.route for each in self.world.live_engines]
        routes.append(self.trainer.route)
        apart = [each for each in routes if self._random.random() < 0.5]
        for route in apart:
            self.world.network.cut(route, up=index % 3 != 1, down=index % 3 != 2)
        self._part_all()
        self.reach["peers parted"] += len(apart)
        if index % 2:
            self._later(AWAY_MS[index % 4], lambda: self._join(apart))

    def join(self, _engine: SimEngine | None, _index: int) -> None:
        """All links pass frames again."""
        self._join([*(e.route for e in self.world.engines.values()), self.trainer.route])

    def weather(self, _engine: SimEngine | None, index: int) -> None:
        """The network is another one from now on."""
        self.world.network.faults = WEATHER[index % len(WEATHER)]
        self.reach[f"weather {index % len(WEATHER)}"] += 1

    def stop(self, engine: SimEngine | None, index: int) -> None:
        """SIGSTOP of an engine with its sidecar, SIGCONT later."""
        if engine is not None and engine.alive:
            self._lost_rank(engine)
            self._phase("engine stopped", engine)
            engine.process.stop()
            self._later(50.0 + AWAY_MS[index // 4 % 4], engine.process.cont)

    def stop_trainer(self, _engine: SimEngine | None, index: int) -> None:
        if self.trainer.alive:
            self._trainer_phase("trainer stopped")
            self.trainer.process.stop()
            self._later(50.0 + AWAY_MS[index % 4], self.trainer.process.cont)

    def stop_broker(self, _engine: SimEngine | None, index: int) -> None:
        process = self.world.broker_process
        self._broker_phase("broker stopped")
        self._part_all()
        process.stop()
        self._later(50.0 + AWAY_MS[index % 4], process.cont)

    # -- invariants -----------------------------------------------------------------------

    def _check_dp_groups(self) -> None:
        """Ranks of one DP group that run make their tokens together: of the same weights."""
        running: dict[str, tuple[int, str]] = {}
        for engine in self.world.live_engines:
            if engine.dp_size == 1 or not engine.truth.running:
                continue
            version = engine.truth.version
            other = running.setdefault(engine.dp_group, (version, engine.name))
            if other[0] != version:
                raise InvariantViolation(
                    f"{engine.name} and {other[1]} generate together, with versions "
                    f"{version} and {other[0]}"
                )

    def _check_said(self) -> None:
        """Who is quarantined is said to be, and nobody else. (One that still catches up, with a
        second model, say, is said to be updated.)"""
        self.world.run_for(4.0 * self.world.config.heartbeat_ms)
        views = {
            view.name: view for view in self.world.existing_group.status(self.world.now_ms).engines
        }
        for engine in self.world.live_engines:
            if not engine.is_joined or engine.name not in views:
                continue
            partial = bool(engine.session.update.partial)
            said = views[engine.name].phase in ("quarantined", "weights_discarded")
            if engine.session.update.in_place:
                continue
            if partial is not said:
                raise InvariantViolation(
                    f"{engine.name} is partial: {partial}, and said to be {views[engine.name]}"
                )
            self.reach["said to be quarantined"] += said

    def _check_caught_up(self) -> None:
        """Who can come to the group's version without an update of all, has."""
        world, trainer = self.world, self.trainer
        group = world.group
        if group is None or group.owner is None or group.owner.boot != trainer.boot:
            return
        if not trainer.alive:  # and not missed yet
            return
        if not group.version or trainer.kept[0] != group.version or not trainer.is_joined:
            return

        def caught_up() -> bool:
            if trainer.kept[0] != group.version:  # an engine was heard that serves a later one
                return True
            return not stale_dp_groups(group.registry, group.version) and world.is_quiet()

        assert world.run_until(caught_up, within_ms=HEALS_MS), self.story()
        self.reach["all at the version that is kept"] += 1

    # -- inside ----------------------------------------------------------------------------

    def _add_trainer(self, name: str) -> SimTrainer:
        trainer = super()._add_trainer(name)
        trainer.keep_last = self.schedule.keep_last
        if self.schedule.staged:
            trainer.staging = Staging(
                required=False, budget_bytes=0, keep=False, clear_cache=bool(self.schedule.seed % 2)
            )
        return trainer

    def _all_known(self) -> bool:
        """Whether the broker knows who lives, and has missed who does not."""
        return self.world.has_joined() and set(self.world.existing_group.registry.engines) == {
            each.name for each in self.world.live_engines
        }

    def _away(self, index: int) -> float:
        """For how long who dies is gone: in one of five times for good."""
        return NEVER if index % 5 == 4 else AWAY_MS[index % 4]

    def _others(self, engine: SimEngine) -> bool:
        """Whether a DP group is left that is not gone for good."""
        return any(
            each.dp_group != engine.dp_group and each.name not in self._never
            for each in self.world.engines.values()
        )

    def _dies_after(self, engine: SimEngine, sends: int, dies: Callable[[], None]) -> None:
        if sends:
            engine.process.die_after(sends, dies)
        else:
            dies()

    def _group_dies(self, engine: SimEngine, back_ms: float) -> None:
        """The supervisor kills the peer ranks soon, and starts all of them together."""
        if not engine.alive:
            return
        self._tell(f"{engine.name} is killed")
        engine.kill()
        peers = [e for e in self.world.live_engines if e.dp_group == engine.dp_group]
        for peer in peers:
            self._later(300.0 * self._random.random(), peer.kill)
        names = [engine.name, *(peer.name for peer in peers)]
        if back_ms == NEVER and self._others(engine):
            self._never.update(names)
            self.reach["engines never back"] += len(names)
            return
        self._later(300.0 + max(back_ms, 0.0), lambda: self._group_back(names))

    def _group_back(self, names: list[str]) -> None:
        if not any(self.world.engines[name].alive for name in names):
            for name in names:
                self._tell(f"{name} is started")
                self.world.restart_engine(name)
                self.reach["engine restarted"] += 1

    def _broker_back(self) -> None:
        if not self.world.broker_process.alive:
            self._tell("a broker is started")
            self.world.start_broker()
            self.reach["broker restarted"] += 1

    def _bring_back(self) -> None:
        """Who is dead and not gone for good; DP groups as one."""
        world = self.world
        for engine in list(world.engines.values()):
            peers = [e for e in world.engines.values() if e.dp_group == engine.dp_group]
            if engine.alive and engine.peer.link.state is not LinkState.REFUSED:
                continue
            for peer in peers:
                if peer.alive:
                    peer.kill()
            if engine.name in self._never:
                continue
            self._group_back([peer.name for peer in peers])

    def _join(self, routes: list[bytes]) -> None:
        for route in routes:
            self.world.network.heal(route)

    def _part_all(self) -> None:
        for each in self.world.live_engines:
            self._lost_rank(each)

    def _broker_phase(self, what: str) -> None:
        group = self.world.group
        if group is not None:
            self.reach[f"{what} in pause {group.pause.state.value}"] += 1
            self.reach[f"{what} in update {group.update.state.value}"] += 1

    def _later(self, after_ms: float, action: Callable[[], None]) -> None:
        def happens() -> None:
            if action in self._due:
                self._due.remove(action)
                action()

        self._due.append(action)
        self.world.scheduler.call_at(self.world.now_ms + after_ms, happens)

    def _tell(self, what: str) -> None:
        self.told.append((self.world.now_ms, what))


@dataclass(frozen=True)
class Violation:
    """A schedule that failed: what was found, and the brokers' journal of it."""

    seed: int
    found: str
    lines: tuple[str, ...]
    data: bytes


def play(seed: int, reach: Counter[str]) -> Violation | None:
    """Play the schedule of this number: every fifth is one of ranks in lockstep, with requests."""
    rng = random.Random(seed)
    played: waves.Play | Chaos
    if seed % 5 == LOCKSTEP:
        played = waves.Play(waves.schedule(rng), reach)
    else:
        played = Chaos(chaos(seed), reach)
    try:
        played.run()
        if seed % 10 == 0:
            _check_replay(played.world, reach)
    except Exception as error:  # noqa: BLE001 - whatever it is, the schedule has found it
        found = "".join(traceback.format_exception(error)) + f"\n{played.schedule}"
        told = played.told if isinstance(played, Chaos) else []
        return Violation(seed, found, tuple(_lines(played.world, told)), _data(played.world))
    return None


def _check_replay(world: SimWorld, reach: Counter[str]) -> None:
    """What the journals say is what the brokers did, those that were killed, too."""
    for journal in world.journals:
        for each in replay_lives(journal.entries()):
            assert not isinstance(each, Unplayable), each.reason
            assert each[1].difference is None, each[1].difference
        reach["lives replayed"] += 1


def _data(world: SimWorld) -> bytes:
    """The journals of all brokers, as one file that `wavebus replay` takes."""
    data = [journal.data() for journal in world.journals]
    return data[0] + b"".join(each.removeprefix(MAGIC) for each in data[1:])


def _lines(world: SimWorld, told: list[tuple[float, str]]) -> list[str]:
    """What the brokers recorded, as `wavebus journal show` prints it; between that, what happened
    to whom."""
    entries = [entry for journal in world.journals for entry in journal.entries()]
    lines = [(entry.record.now_ms, 1, line(entry)) for entry in entries]
    lines += [(now_ms, 0, f"-- {now_ms / 1000:.3f} s: {what}") for now_ms, what in told]
    return [text for _, _, text in sorted(lines, key=lambda each: each[:2])]
