"""Schedules: what happens to a group, drawn from seeds, played in simulated time."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from bus._protocol.core.link import LinkState
from bus._protocol.engine.calls import (
    Call,
    CallCommit,
    CallPause,
    CallResume,
    CallSleep,
    CallWakeWeights,
)
from bus.errors import Refused
from bus.messages import (
    WIRE_NAMES,
    WIRE_VERSION,
    Abort,
    Commit,
    Envelope,
    Message,
    NackCode,
    PauseLocal,
    Resume,
    UpdateStart,
    Verify,
    codec,
)
from bus.operations import (
    ArmManifest,
    Extend,
    Finish,
    LoadChunk,
    Open,
    ReceiveChunk,
    Restore,
    Start,
)
from tests.sim.engine import TENSORS, Behaviour, SimEngine
from tests.sim.memory_network import Faults
from tests.sim.watch import Watch
from tests.sim.world import GROUP, SimWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.sim.scripts import Outcome
    from tests.sim.trainer import SimTrainer


class Schedulable(Protocol):
    """A frozen dataclass with actions."""

    @property
    def actions(self) -> tuple[Any, ...]: ...


class Runs(Protocol):
    """It plays one schedule."""

    def run(self) -> None: ...


S = TypeVar("S", bound=Schedulable)

CALLS: Final[tuple[type[Call], ...]] = (
    CallPause,
    LoadChunk,
    ReceiveChunk,
    ArmManifest,
    Start,
    Finish,
    CallCommit,
    CallResume,
    Open,
    Restore,
    CallSleep,
    CallWakeWeights,
)
# What it takes a trainer to send a chunk.
SEND_MS: Final = (0.0, 3.0, 40.0, 400.0)
# A part of the examples is enough to catch a mutant.
SHARE: Final = float(os.environ.get("WAVEBUS_MODEL_SHARE", "1"))
# Longer than a lease, a missed peer, a refused name and a pause's time together.
SETTLE_MS: Final = 120_000.0


def play_all(
    count: int, build: Callable[[random.Random], S], player: Callable[[S, Counter[str]], Runs]
) -> Counter[str]:
    """Have a new ``player`` run what ``build`` makes of each of the seeds 0 to ``count``, the same
    on every machine; return which states all of them reached.

    ``WAVEBUS_SHRINK=1`` leaves out of the first schedule that fails every action that it can.
    """
    reach: Counter[str] = Counter()

    def play(schedule: S) -> None:
        player(schedule, reach).run()

    for seed in range(max(1, int(count * SHARE))):
        schedule = build(random.Random(seed))
        try:
            play(schedule)
        except Exception as error:
            if os.environ.get("WAVEBUS_SHRINK"):
                schedule = _shrunk(schedule, play)
            error.add_note(f"schedule of seed {seed}: {schedule}")
            raise
    return reach


def _shrunk(schedule: S, play: Callable[[S], None]) -> S:
    """The schedule with as few actions as fail still."""
    index = 0
    while index < len(schedule.actions):
        actions = schedule.actions[:index] + schedule.actions[index + 1 :]
        fewer: S = replace(schedule, actions=actions)  # type: ignore[type-var]
        try:
            play(fewer)
        except Exception:  # noqa: BLE001 - whatever fails
            schedule = fewer
        else:
            index += 1
    return schedule


@dataclass(frozen=True)
class Action:
    """After ``wait_ms``, something happens to the engine ``index`` (modulo their number)."""

    wait_ms: int
    what: str
    index: int = 0


@dataclass(frozen=True)
class Schedule:
    """``sizes`` are those of the DP groups; ``faults`` the network's, in percent and ms."""

    seed: int
    sizes: tuple[int, ...]
    drop: int
    duplicate: int
    jitter_ms: int
    reorder: bool
    slow_ms: int
    fail: int
    actions: tuple[Action, ...] = field(default=())


def schedules(
    kinds: Sequence[str], *, most: int = 8, fail: int = 6, longest_ms: int = 900
) -> Callable[[random.Random], Schedule]:
    """Schedules of these actions."""

    def build(rng: random.Random) -> Schedule:
        actions = [
            Action(
                rng.randint(0, rng.choice([60, longest_ms])), rng.choice(kinds), rng.randint(0, 5)
            )
            for _ in range(rng.randint(2, most))
        ]
        return Schedule(
            seed=rng.randrange(2**16),
            sizes=rng.choice(
                [(1,), (1, 1), (2,), (1, 2), (3,), (2, 2), (1, 1, 1), (1, 3), (2, 1, 3), (1,) * 6]
            ),
            drop=rng.choice([0, 0, 2, 10]),
            duplicate=rng.choice([0, 5, 20]),
            jitter_ms=rng.choice([0, 5, 40]),
            reorder=rng.random() < 0.5,
            slow_ms=rng.choice([5, 40, 200]),
            fail=rng.randint(0, fail),
            actions=tuple(actions),
        )

    return build


class Play:
    """One schedule, played. ``draft``: engines have draft models, which are updated, too."""

    draft = False

    def __init__(self, schedule: Schedule, reach: Counter[str]) -> None:
        self.schedule = schedule
        self.reach = reach
        faults = Faults(
            drop=schedule.drop / 100,
            duplicate=schedule.duplicate / 100,
            delay_ms=1.0,
            jitter_ms=float(schedule.jitter_ms),
            reorder=schedule.reorder,
        )
        self.world = SimWorld(seed=schedule.seed, faults=faults, draft=self.draft)
        self.watch = Watch(self.world, reach)
        self.payload = 0
        self.brokers = 1
        self.verify: Verify = "off" if schedule.seed // 8 % 4 == 0 else "full"
        for size in schedule.sizes:
            rate = dict.fromkeys(CALLS, schedule.fail / 100)
            for engine in self.world.add_dp_group(size):
                engine.behaviour = Behaviour(
                    max_ms=float(schedule.slow_ms),
                    fail_rate=dict(rate),
                    prefetch_depth=1 + schedule.seed // 16 % 2,
                )
        self.trainer = self._add_trainer("trainer")

    def run(self) -> None:
        """Play it all, heal the world, and see that it comes back to its best."""
        self.world.run_until(
            lambda: self.trainer.is_joined and self.world.has_joined(), within_ms=4000
        )
        for action in self.schedule.actions:
            self.world.run_for(action.wait_ms)
            self.act(action)
        self.end()

    def act(self, action: Action) -> None:
        """One action; one that makes no sense now does nothing."""
        engine = self._engine(action.index)
        if action.what.startswith("at "):
            self._wait_for(action.what.removeprefix("at "))
            return
        getattr(self, action.what)(engine, action.index)

    def end(self) -> None:
        """Heal; bring the dead back; all that was asked is answered, all run again."""
        world = self.world
        world.heal()
        for name, engine in list(world.engines.items()):
            if not engine.alive:
                world.restart_engine(name)
            elif engine.peer.link.state is LinkState.REFUSED:
                engine.leave()  # another process held its name for longer than its patience
                world.restart_engine(name)
        settled = world.settle(within_ms=SETTLE_MS)
        assert settled, f"not at rest after {SETTLE_MS} ms: {self.story()}"
        self.watch.check_end()
        if self.trainer.peer.link.state is LinkState.REFUSED:
            self.trainer.leave()  # another one held the group for longer than its patience
        if not self.trainer.alive:
            self.reach["at rest without a trainer"] += 1
            self.new_trainer(None, 0)
        self.last_update()
        self.watch.count_end()
        if self.brokers == 1:
            self.watch.check_versions()

    def last_update(self) -> None:
        """A whole update, of each target, frees whoever is quarantined; afterwards all serve one
        version."""
        world = self.world
        if not self.trainer.is_joined:
            assert world.run_until(lambda: self.trainer.is_joined, within_ms=SETTLE_MS), (
                self.story()
            )
        assert world.run_until(world.has_joined, within_ms=SETTLE_MS), self.story()
        was_quarantined = [e for e in world.live_engines if e.session.update.partial]
        self.trainer.quorum = 1
        self.update(None, 0)
        assert world.settle(within_ms=SETTLE_MS), self.story()
        outcome = self.trainer.outcomes[-1]
        if self.draft:
            outcome = self._last_of_the_draft(outcome)
        assert outcome.error is None, f"{outcome}: {self.story()}"
        assert not outcome.excluded, self.story()
        for engine in world.live_engines:
            assert engine.truth.running, self.story()
            assert engine.truth.version == outcome.version, self.story()
            for target, weights in engine.truth.models.items():
                payload = self.payload - (self.draft and target == "model")
                assert set(weights.values()) == {payload}, self.story()
        self.reach["freed by a whole update"] += len(was_quarantined)

    def _last_of_the_draft(self, model: Outcome) -> Outcome:
        """The model is whole by now; whose draft is not, stays where it was."""
        refused = model.error
        if refused is not None:  # nobody was left to be resumed
            assert isinstance(refused, Refused), self.story()
            assert refused.code is NackCode.EMPTY_GROUP, self.story()
        for engine in self.world.live_engines:
            assert engine.session.update.partial <= {"draft"}, self.story()
            assert not (engine.truth.running and engine.truth.broken), self.story()
            self.reach["draft left partial by the model's"] += bool(engine.truth.broken)
        self.update_draft(None, 0)
        assert self.world.settle(within_ms=SETTLE_MS), self.story()
        return self.trainer.outcomes[-1]

    # -- actions ------------------------------------------------------------------

    def update(self, _engine: SimEngine | None, index: int) -> None:
        if self.trainer.alive and not self.trainer.is_busy:
            self.payload += 1
            think_ms, tensors = 30.0 * index, TENSORS[:: 1 if self.payload % 2 else -1]
            script = self.trainer.update(
                self.payload, tensors=tensors, think_ms=think_ms, verify=self.verify
            )
            self.trainer.run(script)

    def update_parts(self, engine: SimEngine | None, index: int) -> None:
        """In two or three parts. Sometimes one is missing at the end, or refused by one engine, or
        it takes one its time to check it."""
        if not self.trainer.alive or self.trainer.is_busy:
            return
        self.payload += 1
        first, *further = (TENSORS[:1], TENSORS[1:2], TENSORS[2:])
        if index in (1, 2):
            further = further[:1]
            self.reach["a part missing"] += 1
        elif index == 3 and engine is not None:
            engine.behaviour.fail_next.add(Extend)
        elif index == 4 and engine is not None:
            engine.behaviour.slow_ms[Extend] = 700.0
        script = self.trainer.update(
            self.payload, tensors=first, parts=further, think_ms=20.0, verify=self.verify
        )
        self.trainer.run(script)

    def update_draft(self, _engine: SimEngine | None, index: int) -> None:
        if self.trainer.alive and not self.trainer.is_busy:
            self.payload += 1
            script = self.trainer.update(
                self.payload, think_ms=30.0 * index, verify=self.verify, target="draft"
            )
            self.trainer.run(script)

    def fail_draft_load(self, engine: SimEngine | None, _index: int) -> None:
        """The next load, of a draft, fails on one engine."""
        if engine is not None:
            engine.behaviour.fail_next.add(LoadChunk)
            self.update_draft(None, 0)

    def fail_load(self, engine: SimEngine | None, _index: int) -> None:
        """The next load fails on one engine, while its peer ranks have yet to receive the chunk."""
        if engine is None:
            return
        engine.behaviour.fail_next.add(LoadChunk)
        for peer in self.world.live_engines:
            if peer.dp_group == engine.dp_group and peer is not engine:
                peer.behaviour.slow_ms[ReceiveChunk] = 500.0
        self.update(None, 0)

    def hasty(self, _engine: SimEngine | None, _index: int) -> None:
        """A start that does not wait for ARMED."""
        if self.trainer.alive and not self.trainer.is_busy:
            self.payload += 1
            self.trainer.run(self.trainer.hasty(self.payload))

    def wrong_digest(self, _engine: SimEngine | None, _index: int) -> None:
        """A manifest whose names or shapes changed on the way: its digest is another one's."""
        if self.trainer.alive and not self.trainer.is_busy:
            self.payload += 1
            self.trainer.run(self.trainer.hasty(self.payload, digest="0" * 32))
            self.reach["another digest"] += 1

    def garble(self, engine: SimEngine | None, _index: int) -> None:
        """The next chunk breaks on its way to one engine."""
        if engine is not None and self.verify == "full":
            engine.behaviour.garble_next = True
            self.update(None, 0)

    def pause(self, _engine: SimEngine | None, index: int) -> None:
        if self.trainer.alive and not self.trainer.is_busy:
            self.trainer.run(self.trainer.pause(hold_ms=100.0 * index))

    def update_in_pause(self, _engine: SimEngine | None, index: int) -> None:
        """Two updates in one pause, or one."""
        if self.trainer.alive and not self.trainer.is_busy:
            payloads = range(self.payload + 1, self.payload + 2 + index % 2)
            self.payload += len(payloads)
            self.trainer.run(self.trainer.update_in_pause(*payloads, hold_ms=700.0 * index))

    def sleep(self, _engine: SimEngine | None, index: int) -> None:
        """Level 1 or 2, each with or without an update."""
        if self.trainer.alive and not self.trainer.is_busy:
            payload = 0
            if index % 3:
                self.payload += 1
                payload = self.payload
            script = self.trainer.sleep(
                2 if index % 2 else 1, payload=payload, hold_ms=40.0 * index, verify=self.verify
            )
            self.trainer.run(script)

    def fail_sleep(self, engine: SimEngine | None, index: int) -> None:
        """The next sleep, or wake, fails on one engine."""
        if engine is not None:
            kinds: tuple[type[Call], ...] = (CallSleep, CallWakeWeights, CallResume)
            engine.behaviour.fail_next.add(kinds[index % 3])
            self.sleep(None, index)

    def kill(self, engine: SimEngine | None, _index: int) -> None:
        if engine is not None and engine.alive:
            self._lost_rank(engine)
            self._phase("engine killed", engine)
            engine.kill()

    def restart(self, engine: SimEngine | None, _index: int) -> None:
        if engine is not None:
            self._lost_rank(engine)
            self.world.restart_engine(engine.name)
            self.reach["engine restarted"] += 1

    def leave(self, engine: SimEngine | None, _index: int) -> None:
        if engine is not None and engine.alive:
            self._lost_rank(engine)
            engine.leave()

    def cut(self, engine: SimEngine | None, _index: int) -> None:
        if engine is not None:
            self._lost_rank(engine)
            self._phase("engine cut", engine)
            self.world.network.cut(engine.route)

    def heal(self, engine: SimEngine | None, _index: int) -> None:
        if engine is not None:
            self.world.network.heal(engine.route)

    def fail(self, engine: SimEngine | None, index: int) -> None:
        if engine is not None:
            engine.behaviour.fail_next.add(CALLS[(index + self.schedule.seed) % len(CALLS)])

    def slow(self, engine: SimEngine | None, index: int) -> None:
        if engine is not None:
            engine.behaviour.slow_ms[CALLS[(index + self.schedule.seed) % len(CALLS)]] = 1500.0

    def fail_pause(self, engine: SimEngine | None, _index: int) -> None:
        """The next pause will not be made by one engine, and another one takes its time."""
        engines = self.world.live_engines
        if engine is not None and engines:
            engine.behaviour.fail_next.add(CallPause)
            engines[-1].behaviour.slow_ms[CallPause] = 700.0

    def kill_trainer(self, _engine: SimEngine | None, _index: int) -> None:
        if self.trainer.alive:
            self._trainer_phase("trainer killed")
            self.trainer.kill()

    def leave_trainer(self, _engine: SimEngine | None, _index: int) -> None:
        if self.trainer.alive:
            self.trainer.leave()

    def new_trainer(self, _engine: SimEngine | None, index: int) -> None:
        """A new life of the trainer, under its own name or another one."""
        if self.trainer.alive:
            return
        self.trainer = self._add_trainer("trainer" if index % 2 else f"trainer{index}")
        self.reach["trainer restarted"] += 1

    def cut_trainer(self, _engine: SimEngine | None, _index: int) -> None:
        self._trainer_phase("trainer cut")
        self.world.network.cut(self.trainer.route)

    def heal_trainer(self, _engine: SimEngine | None, _index: int) -> None:
        self.world.network.heal(self.trainer.route)

    def restart_broker(self, _engine: SimEngine | None, _index: int) -> None:
        for each in self.world.live_engines:
            # A rank that joins the new broker before its quarantined peer rank may be resumed.
            self._lost_rank(each)
        self.world.restart_broker()
        self.brokers += 1
        self.reach["broker restarted"] += 1

    def forge(self, _engine: SimEngine | None, index: int) -> None:
        """A command of an older epoch, as of a trainer that was replaced."""
        group = self.world.group
        trainer = self.trainer
        if group is None or not trainer.alive or not trainer.is_joined or group.epoch < 1:
            return
        ids = (group.pause.update_id, group.update.update_id)
        message: Message = (
            Resume(ids[0]),
            UpdateStart(ids[1]),
            Commit(ids[1], group.update.version, "", ()),
        )[index % 3]
        peer = trainer.peer
        peer._transmit(message, peer.new_id(), 0, group.epoch - 1)
        self.reach["forged"] += 1

    def silence(self, _engine: SimEngine | None, index: int) -> None:
        """In a pause or an update, no engine hears the broker for longer than any lease."""
        self._wait_for("update loading" if index % 3 == 0 else "pause paused")
        routes = [each.route for each in self.world.live_engines]
        for each in self.world.live_engines:
            self._lost_rank(each)
            self.world.network.cut(each.route)
        self.world.run_for(7500.0)
        for route in routes:
            self.world.network.heal(route)

    def twin(self, engine: SimEngine | None, _index: int) -> None:
        """Another process under the name of an engine tries to come in for a while. That of a rank
        leaves if it is let in, since no peer rank's engine runs with its engine."""
        if engine is None:
            return
        twin = self.world.make_engine(
            engine.name, dp_group=engine.dp_group, dp_rank=engine.dp_rank, dp_size=engine.dp_size
        )
        twin.start()
        self.world.run_until(lambda: twin.is_joined and twin.dp_size > 1, within_ms=1000.0)
        self.reach["twin kept out"] += not twin.is_joined
        self.world.superseded_boots.add(twin.boot)
        twin.leave()

    def rival(self, _engine: SimEngine | None, _index: int) -> None:
        """Another trainer wants the group for a while."""
        rival = self.world.make_trainer("rival")
        rival.start()
        self.world.run_for(1000.0)
        self.reach["rival kept out"] += rival.nacks[NackCode.GROUP_HELD] > 0
        self.world.superseded_boots.add(rival.boot)
        rival.leave()

    def ghost(self, engine: SimEngine | None, index: int) -> None:
        """A broker of before, which still lives somewhere, commands an engine."""
        if engine is None or not engine.alive or engine.highest_epoch < 1:
            return
        session = engine.session
        message: Message = (
            Resume(session.pause.update_id),
            Abort(session.update.update_id, "a ghost"),
            Commit(session.update.update_id, session.version + 1, "", ()),
            PauseLocal("u0-ghost", "abort", True, 10_000, 10_000, 0, "keep"),
        )[index % 4]
        frame = codec.encode(
            Envelope(
                WIRE_VERSION,
                WIRE_NAMES[type(message)],
                1,
                0,
                "broker",
                999,
                GROUP,
                engine.highest_epoch - 1,
                10**9 + len(engine.commands),
                codec.encode_body(message),
            )
        )
        self.world.network.send_to_client(engine.route, frame)
        self.reach["ghost"] += 1

    # -- inside -------------------------------------------------------------------

    def _add_trainer(self, name: str) -> SimTrainer:
        trainer = self.world.add_trainer(name)
        trainer.send_ms = SEND_MS[self.schedule.seed % 4]
        trainer.collective = self.schedule.seed // 4 % 2 == 0
        trainer.pipelined = self.schedule.seed // 8 % 2 == 0
        trainer.quorum = 1 + self.schedule.seed // 16 % 2
        return trainer

    def story(self) -> str:
        """Where everybody stands, for a failure's text."""
        group = self.world.existing_group
        engines = {
            e.name: (e.alive, e.is_joined, e.session.phase, e.session.update.state.value)
            for e in self.world.engines.values()
        }
        waiting = [r.message for r in self.trainer.unanswered]
        return (
            f"{self.schedule}\npause {group.pause.state} {group.pause.update_id}, "
            f"update {group.update.state}, epoch {group.epoch}, owner {group.owner}, "
            f"engines {engines}, trainer {self.trainer.peer.link.state} waits for {waiting}, "
            f"quarantined {group.registry.quarantined}"
        )

    def _wait_for(self, where: str) -> None:
        """Until the group is there, or the script that leads there has ended."""
        kind, state = where.split()
        getattr(self, kind)(None, 2)

        def there() -> bool:
            group = self.world.group
            if group is not None and state == "unsent":
                return any(chunk.waiting_for_trainer for chunk in group.update.chunks.values())
            machine = "update" if kind.startswith("update_") else kind
            return group is not None and getattr(group, machine).state == state

        self.world.run_until(lambda: there() or not self.trainer.is_busy, within_ms=3000.0)
        if there():
            self.reach[f"stopped at {where}"] += 1

    def _engine(self, index: int) -> SimEngine | None:
        engines = list(self.world.engines.values())
        return engines[index % len(engines)] if engines else None

    def _lost_rank(self, engine: SimEngine) -> None:
        for each in self.world.live_engines:
            if each.dp_group == engine.dp_group:
                self.watch.lost_ranks.add(each.dp_group)

    def _phase(self, what: str, engine: SimEngine) -> None:
        self.reach[f"{what} while {engine.session.phase}"] += 1

    def _trainer_phase(self, what: str) -> None:
        group = self.world.group
        if group is not None:
            self.reach[f"{what} in pause {group.pause.state.value}"] += 1
            self.reach[f"{what} in update {group.update.state.value}"] += 1
            self.reach[f"{what} in sleep {group.sleep.state.value}"] += 1
            unsent = any(chunk.waiting_for_trainer for chunk in group.update.chunks.values())
            self.reach[f"{what} with a chunk unsent"] += unsent


def reached(reach: Counter[str], least: dict[str, int]) -> None:
    """The states that matter were reached, or the model proves nothing."""
    # A third of the usual counts; a mutant's run plays fewer schedules.
    share = SHARE / 3
    scaled = {key: int(count * share) for key, count in least.items()}
    missing = {key: (reach[key], count) for key, count in scaled.items() if reach[key] < count}
    if os.environ.get("WAVEBUS_REACH"):
        sys.stderr.write(f"{ {key: reach[key] for key in least} }\n")
    assert not missing, f"reached too seldom (found, least): {missing}"
