"""Waves under pauses: requests come to random ranks at random times while a trainer pauses
and resumes over a bad bus. Nothing wedges, and every request ends with all its tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bus._protocol.core.link import LinkState
from bus._protocol.dp.wave import WaveState
from bus._protocol.engine.calls import CallPause
from bus._protocol.group.pause import PauseState
from bus.messages import FirstReqHeld, PauseLocal, StartDpWave, codec
from tests.model._lockstep import LockstepGroup
from tests.model._play import SETTLE_MS, play_all, reached
from tests.sim.ground_truth import InvariantViolation
from tests.sim.memory_network import Faults
from tests.sim.watch import Watch
from tests.sim.world import SimWorld

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from bus._protocol.dp.groups import DpGroup
    from bus.messages import Escalation, PauseMode
    from tests.sim.trainer import SimTrainer

_MODES: Final[list[PauseMode]] = ["keep", "keep", "wait", "abort"]
_ESCALATIONS: Final[list[Escalation]] = ["keep", "abort"]
KINDS: Final = [
    "request",
    "request",
    "request",
    "burst",
    "pause",
    "pause",
    "refuse_and_pause",
    "pause_and_request",
    "request_and_pause",
    "update",
    "stale_start",
    "cut_rank",
    "cut_gateway",
    "heal",
    "restart_broker",
    "kill_trainer",
]
# A rank that has lost its connection gets a request, or another rank does.
ENGINE_STARTED_KINDS: Final = [*KINDS, "lose_start", "lose_start"]
RESTARTED_KINDS: Final = ["request", "burst", "pause", *["request_and_restart"] * 3]


@dataclass(frozen=True)
class Action:
    """After ``wait_ms``, something happens; ``index`` chooses to whom and how."""

    wait_ms: int
    what: str
    index: int


@dataclass(frozen=True)
class Schedule:
    seed: int
    sizes: tuple[int, ...]
    dense: int
    drop: int
    duplicate: int
    jitter_ms: int
    reorder: bool
    actions: tuple[Action, ...]
    engines_start: bool = False


def schedule(
    rng: random.Random, kinds: Sequence[str] = KINDS, *, engines_start: bool = False
) -> Schedule:
    """Short waits, so that requests and phases of pauses meet."""
    actions = [
        Action(rng.randint(0, rng.choice([8, 40, 600])), rng.choice(kinds), rng.randint(0, 60))
        for _ in range(rng.randint(4, 14))
    ]
    return Schedule(
        seed=rng.randrange(2**16),
        sizes=rng.choice([(2,), (2,), (3,), (4,), (2, 2)]),
        dense=rng.choice([0, 0, 1]),
        drop=rng.choice([0, 0, 2, 10]),
        duplicate=rng.choice([0, 5, 20]),
        jitter_ms=rng.choice([0, 2, 20]),
        reorder=rng.random() < 0.5,
        actions=tuple(actions),
        engines_start=engines_start,
    )


def engine_started(rng: random.Random) -> Schedule:
    """The same of groups whose engines start waves by themselves."""
    return schedule(rng, ENGINE_STARTED_KINDS, engines_start=True)


def restarted(rng: random.Random) -> Schedule:
    """Brokers are restarted beside waves, and the network loses nothing."""
    drawn = schedule(rng, RESTARTED_KINDS, engines_start=rng.random() < 0.5)
    return replace(drawn, drop=0, reorder=False, jitter_ms=rng.choice([2, 20]))


class Wire:
    """What the broker sends, looked at on its way."""

    def __init__(self, world: SimWorld, reach: Counter[str]) -> None:
        self._world = world
        self._reach = reach
        self._asked: set[bytes] = set()  # PAUSE_LOCAL went to, in this event
        self._started: set[bytes] = set()  # START_DP_WAVE went to, in this event
        self._pause = PauseState.RUNNING
        self._before: dict[str, tuple[WaveState, bool]] = {}
        self._broker = world.broker
        send = world.network.send_to_client

        def to_client(route: bytes, frame: bytes) -> bool:
            message = codec.decode(frame)[1]
            if isinstance(message, PauseLocal):
                self._asked.add(route)
            elif isinstance(message, StartDpWave):
                self._started.add(route)
                self._reach["start sent"] += 1
            elif isinstance(message, FirstReqHeld):
                self._held(message)
            return send(route, frame)

        world.network.send_to_client = to_client  # type: ignore[method-assign]
        world.checks.append(self.check)

    def check(self) -> None:
        """After every event."""
        group = self._world.group
        if self._world.broker is not self._broker or group is None:
            self._broker, self._pause, self._before = self._world.broker, PauseState.RUNNING, {}
        if group is not None:
            if group.pause.state is PauseState.LOCAL and self._pause is PauseState.RUNNING:
                routes = set(group.registry.routes(group.pause.members))
                if routes - self._asked:
                    raise InvariantViolation("PAUSE_LOCAL is not asked of all ranks at once")
            self._pause = group.pause.state
            if group.pause.state is PauseState.RUNNING:
                for name, peer in group.registry.engines.items():
                    unknown = peer.phase == "paused" and group.registry.is_pause_unknown(name)
                    self._reach["paused beside a rank whose pause is unknown"] += unknown
            for name, dp_group in group.dp_groups.dp_groups.items():
                self._check_wave(dp_group)
                self._before[name] = (dp_group.wave.state, dp_group.wave.kept)
        self._asked.clear()
        self._started.clear()

    def _check_wave(self, group: DpGroup) -> None:
        state = group.wave.state
        before, kept = self._before.get(group.name, (state, False))
        self._reach[f"wave {state.value}"] += state is not before
        if before is WaveState.GLOBAL and kept and state in (WaveState.IDLE, WaveState.RUNNING):
            self._reach["kept and started"] += 1
            if group.coordinator is not None and group.coordinator.route not in self._started:
                raise InvariantViolation(f"a FIRST_REQ of {group.name} that was kept is lost")

    def _held(self, held: FirstReqHeld) -> None:
        group = self._world.existing_group.dp_groups.dp_groups[held.dp_group]
        self._reach["held"] += 1
        if group.wave.state not in (WaveState.GLOBAL, WaveState.DOWN):
            raise InvariantViolation(
                f"a FIRST_REQ is held while {group.name} is {group.wave.state.value}"
            )
        if group.wave.state is WaveState.GLOBAL and not group.wave.kept:
            raise InvariantViolation(f"a FIRST_REQ of {group.name} is not kept over the pause")


class Play:
    """One schedule, played."""

    def __init__(self, schedule: Schedule, reach: Counter[str]) -> None:
        self.schedule = schedule
        self.reach = reach
        self.world = SimWorld(
            seed=schedule.seed,
            faults=Faults(
                drop=schedule.drop / 100,
                duplicate=schedule.duplicate / 100,
                delay_ms=0.3,
                jitter_ms=float(schedule.jitter_ms),
                reorder=schedule.reorder,
            ),
        )
        self.watch = Watch(self.world, reach)
        self.wire = Wire(self.world, reach)
        self.groups = [
            LockstepGroup(self.world, f"dp{number}", size, engines_start=schedule.engines_start)
            for number, size in enumerate(schedule.sizes)
        ]
        for _ in range(schedule.dense):
            self.world.add_dp_group(1)
        self.aborts = False
        self.payload = 0
        self.trainers = 0
        self.trainer = self.new_trainer()

    def run(self) -> None:
        self.world.run_until(
            lambda: self.trainer.is_joined and self.world.has_joined(), within_ms=4000
        )
        for action in self.schedule.actions:
            self.world.run_for(action.wait_ms)
            getattr(self, action.what)(action.index)
        self.end()

    def end(self) -> None:
        """Heal; all that was paused resumes, and every request ends with its tokens."""
        world = self.world
        world.heal()
        for group in self.groups:
            world.network.heal(group.route)
        assert world.settle(within_ms=SETTLE_MS), f"not at rest: {self.story()}"
        self.watch.check_end()
        self._free_the_quarantined()
        requests = [each for group in self.groups for each in group.requests]
        ended = world.run_until(lambda: all(each.ended for each in requests), within_ms=SETTLE_MS)
        assert ended, f"requests hang: {self.story()}"
        for each in requests:
            if each.ended == "length":
                assert each.made == each.tokens
            else:
                assert self.aborts, each
            self.reach[f"request ended by {each.ended}"] += 1
        self.watch.count_end()
        self._check_waves()
        for group in self.groups:
            self.reach["decided locally"] += group.local_decisions
            self.reach["joined while locally paused"] += sum(r.obeyed_paused for r in group.ranks)
            self.reach["escalated"] += sum(len(rank.escalations) for rank in group.ranks)

    # -- actions --------------------------------------------------------------------

    def request(self, index: int) -> None:
        group = self.groups[index % len(self.groups)]
        group.submit(index % group.size, 1 + index)

    def burst(self, index: int) -> None:
        for rank in range(self.groups[0].size):
            self.groups[0].submit(rank, 1 + (index * (rank + 3)) % 40)

    def pause(self, index: int) -> None:
        if not self.trainer.alive:
            self.trainer = self.new_trainer()
        if self.trainer.is_busy or not self.trainer.is_joined:
            return
        mode = _MODES[index % len(_MODES)]
        self.trainer.wait_ms = 20 if mode == "wait" else 0
        self.trainer.escalate = _ESCALATIONS[index % 2]
        self.aborts = self.aborts or mode == "abort" or self.trainer.escalate == "abort"
        self.trainer.run(self.trainer.pause(hold_ms=5.0 * (index % 20), mode=mode))

    def refuse_and_pause(self, index: int) -> None:
        """The engine of one rank refuses the next pause, while its peers' pauses wait for it."""
        group = self.groups[index % len(self.groups)]
        group.ranks[index % group.size].behaviour.fail_next.add(CallPause)
        self.pause(index)

    def update(self, index: int) -> None:
        if self.trainer.alive and self.trainer.is_joined and not self.trainer.is_busy:
            self.payload += 1
            self.trainer.run(self.trainer.update(self.payload, think_ms=float(index)))

    def pause_and_request(self, index: int) -> None:
        """A request comes just when all are paused, or when they are being resumed."""
        self.pause(index)
        wanted = (PauseState.PAUSED, PauseState.GLOBAL, PauseState.RESUMING)[index % 3]
        self._until(wanted)
        self.request(index)

    def request_and_pause(self, index: int) -> None:
        """As in figure 5: a request has come to one rank, the others know nothing yet."""
        self.request(index)
        self.world.run_for(0.1 * (index % 12))
        self.pause(index)

    def stale_start(self, index: int) -> None:
        """A START_DP_WAVE of long ago reaches one rank only."""
        group = self.groups[index % len(self.groups)]
        rank = group.ranks[index % group.size]
        wave = rank.waves.number - 1 - index % 3
        if wave >= 0:
            self.reach["stale start while agreed"] += rank.waves.agreed
            rank.put(lambda: rank.start_wave(wave, None))

    def lose_start(self, index: int) -> None:
        """A rank's connection to the coordinator breaks while another one begins."""
        group = self.groups[index % len(self.groups)]
        rank = index % group.size
        group.ranks[rank].lose_connection()
        group.submit((rank + 1) % group.size, 1 + index)

    def cut_rank(self, index: int) -> None:
        group = self.groups[index % len(self.groups)]
        self.watch.lost_ranks.add(group.name)
        self.world.network.cut(group.ranks[index % group.size].route)
        if index % 3 == 0:
            self.world.run_for(2600.0)  # longer than the bus takes to miss it

    def cut_gateway(self, index: int) -> None:
        self.world.network.cut(self.groups[index % len(self.groups)].route)

    def heal(self, _index: int) -> None:
        for group in self.groups:
            self.world.network.heal(group.route)
            for rank in group.ranks:
                self.world.network.heal(rank.route)

    def restart_broker(self, _index: int) -> None:
        for group in self.groups:
            self.watch.lost_ranks.add(group.name)
        self.world.restart_broker()
        self.reach["broker restarted"] += 1

    def request_and_restart(self, index: int) -> None:
        """A wave begins or ends while its DP coordinator joins a new broker."""
        group = self.groups[index % len(self.groups)]

        def joins() -> bool:
            return group.peer.link.state is LinkState.JOINING

        self.restart_broker(index)
        assert self.world.run_until(joins, within_ms=SETTLE_MS)
        wave = group.coordinator.wave, group.coordinator.running
        if index % 2:
            self.request(index // 2)
        assert self.world.run_until(lambda: not joins(), within_ms=SETTLE_MS)
        now = group.coordinator.wave, group.coordinator.running
        self.reach["wave changed between JOIN and WELCOME"] += now != wave

    def kill_trainer(self, _index: int) -> None:
        if self.trainer.alive:
            self.trainer.kill()
            self.trainer = self.new_trainer()

    def new_trainer(self) -> SimTrainer:
        self.trainers += 1
        return self.world.add_trainer(f"trainer{self.trainers}")

    # -- inside ---------------------------------------------------------------------

    def _check_waves(self) -> None:
        """The last waves end, and the broker knows that, unless the network loses what a
        coordinator says. A frame that another one has overtaken is lost, too."""
        cut = any(each.what == "cut_gateway" for each in self.schedule.actions)
        honest = not (self.schedule.drop or self.schedule.reorder or cut)

        def mirrored(group: LockstepGroup) -> bool:
            held = self.world.group
            found = held.dp_groups.dp_groups.get(group.name) if held is not None else None
            if found is None:
                return False
            number = group.ranks[0].waves.number
            return (found.wave.state, found.wave.wave) == (WaveState.IDLE, number)

        def rests(group: LockstepGroup) -> bool:
            return not group.coordinator.running and not any(r.waves.running for r in group.ranks)

        def all_rest() -> bool:
            return all(rests(each) and (mirrored(each) or not honest) for each in self.groups)

        assert self.world.run_until(all_rest, within_ms=SETTLE_MS), self.story()
        self.reach["mirrored"] += honest
        for group in self.groups:
            if group.engines_start:
                group.check_told()
                self.reach["started by an engine"] += len(group.begun)
                self.reach["STARTs lost"] += group.lost_starts

    def _free_the_quarantined(self) -> None:
        """What an update that broke off has left: a whole one frees them."""
        world = self.world
        if not any(engine.session.update.partial for engine in world.live_engines):
            return
        if self.trainer.peer.link.state is LinkState.REFUSED or not self.trainer.alive:
            self.trainer = self.new_trainer()
        there = lambda: self.trainer.is_joined and world.has_joined()  # noqa: E731 - said once
        assert world.run_until(there, within_ms=SETTLE_MS), self.story()
        self.update(0)
        assert world.settle(within_ms=SETTLE_MS), self.story()
        assert self.trainer.outcomes[-1].error is None, self.story()
        self.reach["freed by a whole update"] += 1

    def _until(self, state: PauseState) -> None:
        def there() -> bool:
            group = self.world.group
            return group is not None and group.pause.state is state

        self.world.run_until(lambda: there() or not self.trainer.is_busy, within_ms=2000.0)
        if there():
            self.reach[f"request at pause {state.value}"] += 1

    def story(self) -> str:
        """Where everybody stands."""
        told = [f"{self.schedule}", f"pause {self.world.existing_group.pause.state}"]
        for group in self.groups:
            view = self.world.existing_group.dp_groups.dp_groups.get(group.name)
            told.append(
                f"{group.name}: {group.coordinator.state}, wave {group.coordinator.wave}, "
                f"broker {view.view() if view else None}"
            )
            told += [
                f"  {r.name} {r.session.phase} blocked={r.blocked!r} wave {r.waves.number} "
                f"running {r.waves.running} paused {r.waves.paused} agreed {r.waves.agreed} "
                f"mode {r.mode} requests {[e for e in r.requests if not e.ended]}"
                for r in group.ranks
            ]
        return "\n".join(told)


def test_no_order_of_requests_and_pauses_wedges_a_group() -> None:
    """Every invariant after every event, in every schedule; and the states were reached."""
    reach = play_all(250, schedule, Play)
    reached(
        reach,
        {
            "all paused": 160,
            "recovered forward": 15,
            "start sent": 250,
            "held": 80,
            "kept and started": 60,
            "decided locally": 100,
            "joined while locally paused": 80,
            "stale start while agreed": 20,
            "escalated": 30,
            "request at pause paused": 15,
            "request at pause resuming": 30,
            "request ended by length": 700,
            "request ended by abort": 10,
            "broker restarted": 60,
            "wave locally paused": 200,
            "wave globally paused": 200,
            "wave down": 10,
        },
    )


def test_no_order_wedges_a_group_whose_engines_start_waves() -> None:
    """No front end asks, no broker answers, and the plugin's guard remembers nothing."""
    reach = play_all(250, engine_started, Play)
    assert not {"start sent", "held", "kept and started", "decided locally"} & set(+reach)
    reached(
        reach,
        {
            "all paused": 100,
            "started by an engine": 300,
            "STARTs lost": 100,
            "mirrored": 100,
            "joined while locally paused": 20,
            "stale start while agreed": 10,
            "request at pause paused": 5,
            "request at pause resuming": 10,
            "request ended by length": 700,
            "broker restarted": 30,
        },
    )


def test_a_restarted_broker_shows_the_wave_that_the_coordinator_has() -> None:
    """Not the one of the JOIN, though the coordinator sends no report before WELCOME."""
    reach = play_all(40, restarted, Play)
    reached(
        reach,
        {
            "mirrored": 40,
            "broker restarted": 170,
            "wave changed between JOIN and WELCOME": 50,
        },
    )


def test_a_pause_that_raised_although_it_was_made_is_made_again() -> None:
    """By a rank whose peer rank is paused, and before a new broker resumes either of them."""
    actions = (
        Action(37, "refuse_and_pause", 31),
        Action(200, "pause", 53),
        Action(4, "refuse_and_pause", 16),
        Action(168, "restart_broker", 23),
    )
    drawn = Schedule(20916, (2,), 0, 10, 5, 20, reorder=True, actions=actions)
    reach: Counter[str] = Counter()
    Play(drawn, reach).run()
    assert reach["paused beside a rank whose pause is unknown"] > 0
