"""A DP group in simulated time: ranks that step in lockstep, front ends, a DP coordinator.

The ranks' waves are the embedded engine's own machine
(:class:`sidecar._embedded.parallel.waves.RankWaves`), the coordinator is the real DP coordinator's,
the sidecars' machines and the broker are the real ones. Made up are the collectives: one
lasts a moment once every rank is in it, and ranks that wait in different ones wait for
ever, which is the wedge that must never be.

A group's waves are started by its front ends, as in vLLM 0.32, or by its engines, as in 0.33
(``engines_start``).
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bus._protocol.core.effects import Note, Send
from bus._protocol.core.link import LinkState
from bus._protocol.dp.coordinator import DpCoordinator, Publish, Ready, StartCores
from bus._protocol.engine.calls import Call, CallEscalate, CallPause, CallResume
from bus._runtime.peer import PeerClient, route_of
from bus.messages import CoordinatorFacts, Heartbeat, Join, WaveComplete, WaveStarted
from sidecar._dp_coordinator.frames import CoreReport
from sidecar._embedded.parallel.waves import RankWaves
from tests.sim.engine import SimEngine
from tests.sim.ground_truth import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._protocol.dp.coordinator import CoordinatorEffect
    from bus._runtime.interfaces import Handle
    from bus.messages import Envelope, Message, PauseMode
    from tests.sim.world import SimWorld

HOP_MS: Final = 0.3  # between processes of one host
STEP_MS: Final = 1.0
INTERVAL: Final = 4  # of a wave's steps, from one look around to the next


@dataclass
class Request:
    """Some tokens to be made, on one rank."""

    rank: int
    tokens: int
    made: int = 0
    begun: bool = False
    ended: str = ""


class Meeting:
    """Where the ranks meet: a collective begins when all are in it."""

    def __init__(self, world: SimWorld, size: int) -> None:
        self._world = world
        self._size = size
        self._there: dict[int, tuple[str, tuple[int, ...], Callable[[list[int]], None]]] = {}

    def arrive(
        self, rank: int, where: str, numbers: tuple[int, ...], then: Callable[[list[int]], None]
    ) -> None:
        """A rank is there; ``then`` gets the numbers of all, added up."""
        self._there[rank] = (where, numbers, then)
        if len(self._there) < self._size:
            return
        there, self._there = self._there, {}
        places = {rank: place for rank, (place, _, _) in there.items()}
        if len(set(places.values())) > 1:
            raise InvariantViolation(f"wedged: ranks wait in different collectives, {places}")
        sums = [sum(column) for column in zip(*(n for _, n, _ in there.values()), strict=True)]
        # In an order that is not the ranks' own.
        for _, _, each in sorted(there.values(), key=lambda one: -hash((one[0], one[1]))):
            self._later(STEP_MS, lambda each=each: each(sums))  # type: ignore[misc]

    def _later(self, after_ms: float, action: Callable[[], None]) -> None:
        self._world.scheduler.call_at(self._world.now_ms + after_ms, action)


class EngineStartedWaves(RankWaves):
    """One rank's waves as vLLM 0.33 has them, without the guard of wavebus's plugin: only a rank
    that is not paused starts a wave, and a rank that is paused for good drops every START."""

    def on_request(self, wave: int) -> CoreReport | None:
        self.number = max(self.number, wave)
        if self.running or self.paused:
            return None
        self.running = True
        return CoreReport(self.rank, started=self.number)

    def on_start_wave(self, wave: int, excluded: int | None) -> bool:
        if excluded == self.rank or wave < self.number or self.agreed:
            return False
        self.number, self.running = wave, True
        return True


class Rank(SimEngine):
    """One rank: its sidecar's machines as in any simulated engine, and a core in lockstep."""

    group: LockstepGroup
    waves: RankWaves

    def set_up(self, group: LockstepGroup) -> None:
        """Join the others of its group."""
        self.group = group
        kind = EngineStartedWaves if group.engines_start else RankWaves
        self.waves = kind(self.dp_rank, self.dp_size, INTERVAL)
        self.connected = True  # to the DP coordinator, which starts it
        self.requests: list[Request] = []
        self.believes_running = False
        self.believed_wave = 0
        self.mode: PauseMode | None = None
        self.pausing: list[Callable[[], None]] = []
        self.inbox: deque[Callable[[], None]] = deque()
        self.blocked = ""
        self.obeyed_paused = 0

    # -- the front end ------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A client's request."""
        wave = self.believed_wave
        if not self.believes_running and not self.group.engines_start:
            self.believes_running = True
            self.group.later(lambda: self.group.gateway_first_req(self.dp_rank, wave))
        self.put(lambda: self._add(request, wave))

    def told(self, wave: int, *, running: bool) -> None:
        """What the DP coordinator publishes."""
        self.believed_wave, self.believes_running = wave, running

    # -- the core -------------------------------------------------------------------

    def put(self, action: Callable[[], None]) -> None:
        """Something for the core, which looks into its inbox between steps."""
        self.group.later(lambda: self._arrived(action))

    def start_wave(self, wave: int, excluded: int | None) -> None:
        """START_DP_WAVE."""
        number, paused, agreed = self.waves.number, self.waves.paused, self.waves.agreed
        running = self.waves.running
        self.waves.on_start_wave(wave, excluded)
        if excluded == self.dp_rank or wave < number:
            return
        if agreed and not running and self.group.engines_start:
            raise InvariantViolation(
                f"{self.name} drops START_DP_WAVE {wave} while globally paused"
            )
        if agreed and self.waves.running and not self.may_step() and not self.pausing:
            raise InvariantViolation(
                f"{self.name} obeys START_DP_WAVE {wave} while globally paused"
            )
        if paused and not agreed:
            self.obeyed_paused += 1
            if not self.waves.running:
                raise InvariantViolation(f"{self.name} ignores START_DP_WAVE while locally paused")

    def may_step(self) -> bool:
        """Whether it has a request that it may run."""
        if self.mode == "keep":
            return False
        return any(not each.ended and (self.mode is None or each.begun) for each in self.requests)

    def _arrived(self, action: Callable[[], None]) -> None:
        self.inbox.append(action)
        self.turn()

    def turn(self) -> None:
        """Serve the inbox, then step, if there is a wave or something to do."""
        while self.inbox and not self.blocked:
            self.inbox.popleft()()
        if self.blocked:
            return
        self._settle()
        if self.waves.running or self.may_step():
            self.waves.on_step_begin()
            working = self.may_step()
            self._meet("forward", (0,), lambda _: self._stepped(working=working))

    def _stepped(self, *, working: bool) -> None:
        if working:
            for each in self.requests:
                if not each.ended and (self.mode is None or each.begun):
                    each.begun = True
                    each.made += 1
                    if each.made == each.tokens:
                        each.ended = "length"
        if self.waves.on_step_end():
            numbers = (int(self.may_step()), int(self.waves.paused))
            self._meet("sync", numbers, self._conferred)
        else:
            self.turn()

    def _conferred(self, sums: list[int]) -> None:
        report = self.waves.on_agreement(sums[0], sums[1])
        self._report(report)
        self._settle()
        self.turn()

    def _meet(
        self, where: str, numbers: tuple[int, ...], then: Callable[[list[int]], None]
    ) -> None:
        self.blocked = where

        def released(sums: list[int]) -> None:
            self.blocked = ""
            then(sums)

        self.group.meeting.arrive(self.dp_rank, where, numbers, released)

    def _settle(self) -> None:
        if self.pausing and self.waves.is_globally_paused and not self.may_step():
            done, self.pausing = self.pausing, []
            for each in done:
                self.group.later(each)

    def lose_connection(self) -> None:
        """What the coordinator publishes is lost, until the rank has subscribed anew."""
        if self.connected:
            self.connected = False
            self.group.later(self._subscribe, 20 * HOP_MS)

    def _subscribe(self) -> None:
        self.connected = True
        self.group.subscribed()

    def _add(self, request: Request, wave: int) -> None:
        self.requests.append(request)
        report = self.waves.on_request(wave)
        if report is not None and report.started is not None:
            self.group.begun.setdefault(report.started, set()).add(self.dp_rank)
        self._report(report)

    def _report(self, report: CoreReport | None) -> None:
        if report is not None:
            self.group.later(lambda: self.group.gateway_report(report))

    def _pause(self, mode: PauseMode, then: Callable[[], None]) -> None:
        self.mode = mode
        if mode == "abort":
            for each in self.requests:
                each.ended = each.ended or "abort"
        self.pausing.append(then)
        self.waves.pause()

    def _resume(self, then: Callable[[], None]) -> None:
        if not self.waves.paused:
            self.group.later(then)
            return
        self.mode = None

        def met(sums: list[int]) -> None:
            self.waves.on_resumed(unfinished=sums[0] > 0)
            self.group.later(then)
            self.turn()

        self._meet("barrier", (int(self.may_step()),), met)

    # -- engine calls, as the sidecar makes them ------------------------------------

    def _begin(self, call: Call) -> None:
        if not isinstance(call, CallPause | CallResume):
            super()._begin(call)
            return
        self.calls.append(call)
        self.running_call = call
        self.lease.begin(call)
        self.truth.begin(call)

        def returned() -> None:
            if self.alive and self.running_call is call:
                self._on_returned(call)

        if type(call) in self.behaviour.fail_next:
            self.group.later(lambda: self._on_returned(call))  # which fails it
        elif isinstance(call, CallPause):
            self.lease_ran_out = self.pause_failed = False
            self.put(lambda: self._pause(call.mode, returned))
        else:
            self.put(lambda: self._resume(returned))

    def resume_by_core(self) -> None:
        super().resume_by_core()
        self.put(lambda: self._resume(lambda: None))

    def _escalate(self, call: CallEscalate) -> None:
        self.session.pause.on_escalated(
            tuple(str(n) for n, each in enumerate(self.requests) if each.begun)
        )
        self.escalations.append(call)

        def returned() -> None:
            if self.alive:
                self.truth.on_escalated(clear_cache=call.clear_cache)
                self._perform(self.session.on_escalation_done(None, self._scheduler.now_ms()))

        self.put(lambda: self._pause(call.mode, returned))


@dataclass
class LockstepGroup:
    """The ranks of one DP group, and its DP coordinator on the bus."""

    world: SimWorld
    name: str
    size: int
    ranks: list[Rank] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    engines_start: bool = False
    # Which ranks have said of a wave that they began it, and what the broker is told of waves.
    begun: dict[int, set[int]] = field(default_factory=dict)
    told: list[WaveStarted | WaveComplete] = field(default_factory=list)
    lost_starts: int = 0
    _boots: itertools.count[int] = field(default_factory=lambda: itertools.count(10**6))

    def __post_init__(self) -> None:
        world = self.world
        self.meeting = Meeting(world, self.size)
        self.coordinator = DpCoordinator(self.name, self.size)
        self.local_decisions = 0
        self.held = 0
        self._timer: Handle | None = None
        boot = next(self._boots)
        self.peer = PeerClient(
            name=f"coordinator-{self.name}",
            group="policy",
            boot=boot,
            transport=world.network.client(route_of(f"coordinator-{self.name}", boot)),
            scheduler=world.scheduler,
            join=self._join,
            beat=lambda: Heartbeat("running", 0, 0, ""),
            on_message=self._on_message,
            on_state=self._on_state,
            link_config=world.link_config,
        )
        for rank in range(self.size):
            engine = world.add_rank(Rank, f"{self.name}-{rank}", self.name, rank, self.size)
            engine.set_up(self)
            self.ranks.append(engine)
            self._perform(self.coordinator.on_core_subscribed())
        self.peer.start()
        self._perform(self.coordinator.tick(world.now_ms))

    @property
    def route(self) -> bytes:
        """The network's name of the DP coordinator."""
        return route_of(self.peer.name, self.peer.boot)

    def later(self, action: Callable[[], None], after_ms: float = HOP_MS) -> None:
        """As something that another process of the host hears of."""
        self.world.scheduler.call_at(self.world.now_ms + after_ms, action)

    def submit(self, rank: int, tokens: int) -> None:
        """A client asks one rank for so many tokens."""
        request = Request(rank, tokens)
        self.requests.append(request)
        self.ranks[rank].submit(request)

    def subscribed(self) -> None:
        """A core has connected to the DP coordinator again."""
        self._perform(self.coordinator.on_core_subscribed())

    def gateway_first_req(self, rank: int, wave: int) -> None:
        broker = self.peer.link.state is LinkState.JOINED
        self._perform(self.coordinator.first_req(rank, wave, self.world.now_ms, broker=broker))

    def gateway_report(self, report: CoreReport) -> None:
        now_ms = self.world.now_ms
        if report.complete is not None:
            self._perform(self.coordinator.complete(report.complete, now_ms))
        if report.started is not None:
            self._perform(self.coordinator.on_started(report.started, report.rank, now_ms))

    def _join(self) -> Join:
        coordinator = self.coordinator
        facts = CoordinatorFacts(
            self.name, self.size, coordinator.wave, coordinator.running, coordinator.started_by
        )
        return Join("coordinator", "sim", 1, None, facts)

    def _on_message(self, _envelope: Envelope, message: Message) -> None:
        if self.peer.link.state is LinkState.JOINED:
            self._perform(self.coordinator.on_message(message, self.world.now_ms))

    def _on_state(self, state: LinkState) -> None:
        if state is LinkState.JOINED:
            # It repeats its last report, which `told` has.
            before, effects = len(self.told), self.coordinator.on_joined(self.world.now_ms)
            self._perform(effects)
            again = self.told[before:]
            assert again == self.told[before - len(again) : before], again
            del self.told[before:]

    def check_told(self) -> None:
        """The broker was told of every wave's end, in order, of no start twice, and of the rank
        that began it. Rank 0 alone reports a wave that a resume began."""
        over = [each.wave for each in self.told if isinstance(each, WaveComplete)]
        assert over == list(range(self.ranks[0].waves.number)), over
        ended, started = -1, -1
        for each in self.told:
            if isinstance(each, WaveComplete):
                ended = each.wave
                continue
            assert each.wave == ended + 1 > started, self.told
            started = each.wave
            assert each.rank in self.begun.get(each.wave, {0}), (each, self.begun)

    def _perform(self, effects: Iterable[CoordinatorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, WaveStarted | WaveComplete):
                self.told.append(effect.message)
            match effect:
                case StartCores(wave, excluded):
                    self.lost_starts += sum(not rank.connected for rank in self.ranks)
                    for rank in filter(lambda each: each.connected, self.ranks):
                        rank.put(lambda r=rank: r.start_wave(wave, excluded))  # type: ignore[misc]
                case Publish(wave, running):
                    for rank in self.ranks:
                        self.later(lambda r=rank: r.told(wave, running=running))  # type: ignore[misc]
                case Send() if self.peer.link.state is LinkState.JOINED:
                    self.peer.perform([effect])
                case Note(event):
                    self.local_decisions += event == "first_req_decided_locally"
                case Ready() | Send():
                    pass
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_ms = self.coordinator.next_deadline_ms()
        self._timer = self.world.scheduler.call_at(due_ms, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self.coordinator.tick(self.world.now_ms))
