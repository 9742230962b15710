"""An engine with its sidecar, simulated: the real machines, a made-up engine, no asyncio.

It mirrors ``sidecar/_sidecar.py``: a frame arrives, the session machine decides, an engine
call is made and returns after a simulated time, and its result goes back into the
machine. :attr:`SimEngine.truth` says what the engine really does meanwhile.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bus._protocol.core.effects import Note, Send
from bus._protocol.core.failures import Failure
from bus._protocol.core.link import LinkConfig, LinkState
from bus._protocol.engine.calls import (
    COMMANDS,
    Call,
    CallCancel,
    CallEscalate,
    CallPause,
    CallProbe,
    CallResult,
    CallResume,
    CallStrengthenPause,
    SessionEffect,
)
from bus._protocol.engine.session import EngineSession
from bus._runtime.peer import PeerClient, route_of
from bus._weight_transfer.allocation import StagingCapacity
from bus.errors import EngineError
from bus.messages import (
    Ack,
    Arm,
    ChunkSent,
    EngineFacts,
    Envelope,
    Heartbeat,
    HeartbeatAck,
    Join,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    Resume,
    Step,
)
from bus.operations import (
    ArmManifest,
    Done,
    LoadChunk,
    Open,
    ReceiveChunk,
    SwapStaged,
)
from tests.sim.ground_truth import GroundTruth, InvariantViolation
from tests.sim.rank_lease import SimLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._runtime.interfaces import Handle, Scheduler
    from tests.sim.process import Process

TENSORS: Final = ("embed", "block.0", "block.1", "head")
STEP_MS: Final = 16.0  # between two times at which ranks in lockstep confer


@dataclass(slots=True)
class Behaviour:
    """How an engine's calls go. Change it while the engine runs, as a script would.

    Attributes:
        min_ms: the least that a call takes, in simulated milliseconds.
        max_ms: the most.
        slow_ms: what calls of one kind take instead.
        fail_rate: the probability that a call of one kind fails.
        fail_next: kinds whose next call fails.
        hold: kinds that do not return until :meth:`SimEngine.release`.
        garble_next: the next chunk that is received is not what was sent.
        ahead: how many chunks it may receive ahead of their load.
        twist_next: the next update is loaded wrongly, which only probes show.
        stages: it has room to stage an update.
        deaf_to: commands that do not reach it.
    """

    min_ms: float = 1.0
    max_ms: float = 20.0
    slow_ms: dict[type[Call], float] = field(default_factory=dict)
    fail_rate: dict[type[Call], float] = field(default_factory=dict)
    fail_next: set[type[Call]] = field(default_factory=set)
    hold: set[type[Call]] = field(default_factory=set)
    garble_next: bool = False
    prefetch_depth: int = 1
    twist_next: bool = False
    stages: bool = True
    deaf_to: set[type[Message]] = field(default_factory=set)


class SimEngine:
    """One engine on the bus, from :meth:`start` to :meth:`kill` or :meth:`leave`.

    Args:
        name: its name on the bus.
        process: which it and its sidecar are.
        dp_group: the DP group it is a rank of; its own name if empty.
        tensors: the names of its model's weights, all of shape (4,) and dtype float32.
        version: the version it serves from the beginning.
        draft: it has a draft model of the same names.
        boot: what tells this life from another one of the same name.
        find_peer_rank: finds the rank of a DP group that lives.
    """

    def __init__(
        self,
        name: str,
        *,
        process: Process,
        boot: int,
        group: str = "policy",
        dp_group: str = "",
        dp_rank: int = 0,
        dp_size: int = 1,
        tensors: Iterable[str] = TENSORS,
        version: int = 0,
        draft: bool = False,
        seed: int = 0,
        behaviour: Behaviour | None = None,
        link_config: LinkConfig | None = None,
        find_peer_rank: Callable[[str, int], SimEngine | None] = lambda _group, _rank: None,
    ) -> None:
        self.name = name
        self.process = process
        self.boot = boot
        self.dp_group = dp_group or name
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.draft = draft
        self.behaviour = behaviour or Behaviour()
        self.truth = GroundTruth(name, tensors, version=version, draft=draft)
        self.session = EngineSession(
            name,
            version=version,
            draft=draft,
            dp_size=dp_size,
        )
        self._find_peer_rank = find_peer_rank
        self.lease = SimLease(self)
        self.alive = True
        self.lease_ran_out = False  # in the pause under way
        self.aborted_update = ""  # the update that it left when its lease ran out
        self.pause_failed = False  # its last pause call failed
        self.highest_epoch = 0
        self.commands: list[Message] = []
        self.sent: list[Ack | Nack] = []
        self.notes: list[Note] = []
        self.calls: list[Call] = []
        self.escalations: list[CallEscalate] = []
        self.running_call: Call | None = None
        self.swapped = self.swap_cancelled = False  # of the swap that is under way
        self.returned_ms = process.now_ms()  # when the last call returned, or failed
        self.joins = 0
        self.met: Counter[str] = Counter()  # in which moments of a chunk it heard of it
        self.paused_locally = ""  # the pause that it has acked phase 1 of
        self._random = random.Random(seed)
        self._scheduler: Scheduler = process
        self._timer: Handle | None = None
        self.peer = PeerClient(
            name=name,
            group=group,
            boot=boot,
            transport=process.client(route_of(name, boot)),
            scheduler=process,
            join=self._join,
            beat=self._beat,
            on_message=self._on_message,
            on_state=self._on_state,
            on_tick=self._on_tick,
            next_deadline_ms=self._next_deadline_ms,
            link_config=link_config,
        )

    @property
    def route(self) -> bytes:
        """The network's name of this life."""
        return route_of(self.name, self.boot)

    @property
    def is_joined(self) -> bool:
        return self.peer.link.state is LinkState.JOINED

    def start(self) -> None:
        """Begin to join."""
        self.peer.start()

    def kill(self) -> None:
        """The host is gone, engine and sidecar."""
        self.peer.kill()
        self._end_of_life()

    def leave(self, reason: str = "closed") -> None:
        """Leave the bus in order, and end."""
        self.peer.close(reason)
        self._end_of_life()

    def release(self, kind: type[Call]) -> None:
        """Calls of this kind are not held any more; one that was, returns now."""
        self.behaviour.hold.discard(kind)
        call = self.running_call
        if isinstance(call, SwapStaged) and issubclass(kind, SwapStaged) and self._timer is None:
            self._confer(call)
        elif isinstance(call, kind) and self._timer is None:
            self._timer = self._scheduler.call_at(
                self._scheduler.now_ms(), lambda: self._on_returned(call)
            )

    # -- the link's questions ---------------------------------------------------

    def _join(self) -> Join:
        session = self.session
        facts = EngineFacts(
            kind="sim",
            software="sim 1",
            model="sim",
            dp_group=self.dp_group,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            workers=1,
            backends=("sim",),
            endpoint="",
            can_sleep=True,
            draft=self.draft,
            supervised=False,
            canary="keep",
            version=session.version,
            phase=session.phase,
            update_id=session.shown_id,
            closed=session.admission.closed,
            run=self.peer.link.run or f"{self.boot:x}",
        )
        return Join("engine", "sim", 1, facts, None)

    def _beat(self) -> Heartbeat:
        return self.session.beat()

    def _next_deadline_ms(self) -> float | None:
        return self.session.next_deadline_ms()

    # -- what happens -------------------------------------------------------------

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        if isinstance(message, HeartbeatAck) and self.is_joined:
            now_ms = self._scheduler.now_ms()
            self.session.on_lease_renewed(envelope.epoch, message.held, now_ms)
            self.truth.group_version = message.version
            self._perform(self.session.on_group_version(message.version, now_ms))
        if not self.is_joined or not envelope.group or type(message) not in COMMANDS:
            return
        if type(message) in self.behaviour.deaf_to:
            return
        self.commands.append(message)
        if isinstance(message, Resume):
            self.truth.group_version = max(self.truth.group_version, message.version)
        if isinstance(message, ChunkSent):
            self._note_sent(message)
        if isinstance(message, Arm) and not message.names:
            self.met["asked to arm a digest"] += 1
        effects = self.session.command(
            envelope.id, envelope.epoch, message, self._scheduler.now_ms()
        )
        if envelope.epoch < self.highest_epoch and any(not _refuses(each) for each in effects):
            raise InvariantViolation(
                f"{self.name}: {message} of epoch {envelope.epoch} did {effects}, "
                f"after epoch {self.highest_epoch}"
            )
        self.highest_epoch = max(self.highest_epoch, envelope.epoch)
        if isinstance(message, PauseLocal) and self.session.pause.update_id == message.update_id:
            self.truth.to_clear = message.clear_cache
        self._perform(effects)

    def _note_sent(self, message: ChunkSent) -> None:
        update, call = self.session.update, self.running_call
        if message.update_id != update.update_id:
            return
        self.truth.sent[message.chunk] = bool(message.sums)
        if message.chunk < update._chunks.applied:
            self.met["sent, already applied"] += 1
        elif isinstance(call, ReceiveChunk) and call.seq == message.chunk:
            self.met["sent while it is received"] += 1
        elif isinstance(call, LoadChunk) and call.seq == message.chunk:
            self.met["sent again while it is loaded"] += 1
        elif call is None and message.chunk in self.truth.staged:
            self.met["sent after it is received"] += 1

    def _on_state(self, state: LinkState) -> None:
        if state is LinkState.JOINED:
            self.joins += 1
            version = self.truth.group_version = self.peer.link.version
            self._perform(self.session.on_group_version(version, self._scheduler.now_ms()))

    def _on_tick(self, now_ms: float) -> None:
        self._perform(self.session.tick(now_ms))

    def _perform(self, effects: Iterable[SessionEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if isinstance(effect.message, Ack | Nack):
                    self.sent.append(effect.message)
                if getattr(effect.message, "code", "") == NackCode.MANIFEST_UNKNOWN:
                    self.met["lacked the manifest"] += 1
                if isinstance(effect.message, Ack) and effect.message.step is Step.PAUSE_LOCAL:
                    self.paused_locally = effect.message.update_id
                self.peer.send(effect.message, reply_to=effect.reply_to)
            elif isinstance(effect, CallEscalate):
                self._escalate(effect)
            elif isinstance(effect, CallCancel):
                self._cancel_swap()
            elif isinstance(effect, Note):
                if effect.event == "lease_expired":
                    self.lease_ran_out = True
                    self.aborted_update = self.session.update.update_id
                self.notes.append(effect)
                self.peer.note(effect)
            else:
                self._begin(effect)
        if self.running_call is None and (decided := self.lease.write()):
            self._perform(decided)
        self.peer.arm()

    def _begin(self, call: Call) -> None:
        self.calls.append(call)
        self.running_call = call
        refused = self.lease.begin(call)
        if not refused:
            self.truth.begin(call)
        if isinstance(call, SwapStaged):
            self.swapped = False
            self.swap_cancelled = self._injected_failure(call) is not None
        if isinstance(call, CallPause):
            self.lease_ran_out = False
            self.pause_failed = False
        behaviour = self.behaviour
        if type(call) in behaviour.hold and not refused:
            self._timer = None
            return
        if isinstance(call, SwapStaged) and not self.swap_cancelled:
            self._confer(call)
        else:
            self._return_soon(call)

    def _return_soon(self, call: Call) -> None:
        behaviour = self.behaviour
        spread_ms = behaviour.max_ms - behaviour.min_ms
        took_ms = behaviour.min_ms + self._random.random() * spread_ms
        took_ms = behaviour.slow_ms.get(type(call), took_ms)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._scheduler.call_at(
            self._scheduler.now_ms() + took_ms, lambda: self._on_returned(call)
        )

    # -- swaps ----------------------------------------------------------------------

    @property
    def other_ranks(self) -> list[SimEngine | None]:
        """Of its DP group, those that live; None: it is gone."""
        others = [rank for rank in range(self.dp_size) if rank != self.dp_rank]
        return [self._find_peer_rank(self.dp_group, rank) for rank in others]

    @property
    def can_swap(self) -> bool:
        """Whether it waits for the others at the step that they all are at."""
        waits = isinstance(self.running_call, SwapStaged) and not (
            self.swapped or self.swap_cancelled
        )
        return waits and self.alive and self.truth.running and not self.process.stopped

    def _confer(self, call: SwapStaged) -> None:
        """Where the ranks of a DP group do, all swap as soon as all are ready. An engine alone asks
        nobody."""
        if self.running_call is not call or self.swapped or self.swap_cancelled:
            return
        ranks = [self, *(other for other in self.other_ranks if other is not None)]
        alone = self.dp_size == 1
        if alone or (len(ranks) == self.dp_size and all(rank.can_swap for rank in ranks)):
            for rank in ranks:
                rank.swap(call.version)
            return
        now_ms = self._scheduler.now_ms()
        self._timer = self._scheduler.call_at(now_ms + STEP_MS, lambda: self._confer(call))

    def resume_by_core(self) -> None:
        """All ranks have agreed: without a word of the sidecar's."""
        self.truth.on_core_resumed()

    def swap(self, version: int) -> None:
        """All ranks are ready: now."""
        call = self.running_call
        assert isinstance(call, SwapStaged)
        self.truth.swap(version)
        self.swapped = True
        self._return_soon(call)

    def _cancel_swap(self) -> None:
        """A swap that is not made yet fails; nothing has changed."""
        call = self.running_call
        if isinstance(call, SwapStaged) and not (self.swapped or self.swap_cancelled):
            self.swap_cancelled = True
            self._return_soon(call)

    def _escalate(self, call: CallEscalate) -> None:
        """A second pause: with it the one that still drains returns, too."""
        waiting = self.running_call
        self.session.pause.on_escalated(
            tuple(f"r{number}" for number in range(self.truth.in_flight))
        )
        self.escalations.append(call)

        def end() -> None:
            if not self.alive:
                return
            if isinstance(waiting, CallPause) and self.running_call is waiting:
                if self._timer is not None:
                    self._timer.cancel()
                self._on_returned(waiting)
            self.truth.on_escalated(clear_cache=call.clear_cache)
            self._perform(self.session.on_escalation_done(None, self._scheduler.now_ms()))

        self._scheduler.call_at(self._scheduler.now_ms() + self.behaviour.min_ms, end)

    def _on_returned(self, call: Call) -> None:
        self._timer = None
        if not self.alive:
            return
        self.running_call = None
        self.returned_ms = self._scheduler.now_ms()
        refused = self.lease.refusal
        error = refused or self.truth.refusal(call)
        self.swapped = False
        if isinstance(call, SwapStaged):
            cancelled = EngineError("it was called off", code=NackCode.CALLED_OFF)
            error = cancelled if self.swap_cancelled else None
        elif error is None:
            error = self._injected_failure(call)
        now_ms = self._scheduler.now_ms()
        if error is not None:
            if refused is None:
                self.truth.fail(call)
            self.pause_failed = self.pause_failed or isinstance(call, CallPause)
            failure = Failure(error.code, error.detail, tensor=error.tensor)
            self._perform(self.session.on_call_failed(call, failure, now_ms))
            return
        result: CallResult = None
        if isinstance(call, CallPause | CallStrengthenPause):
            result = self.truth.in_flight
        elif isinstance(call, SwapStaged):
            result = Done(in_flight=self.truth.in_flight)
        elif isinstance(call, Open):
            self.truth.prefetch_depth = self.behaviour.prefetch_depth
            result = Done(ahead=self.truth.prefetch_depth)
        elif isinstance(call, ArmManifest) and call.staging is not None:
            room = StagingCapacity(16, "" if self.behaviour.stages else "no room")
            result = Done(room=room)
        elif isinstance(call, CallProbe):
            twisted, self.behaviour.twist_next = self.behaviour.twist_next, False
            result = self.truth.probe(twisted=twisted)
        self.truth.end(call)
        if isinstance(call, ReceiveChunk) and self.behaviour.garble_next:
            self.behaviour.garble_next = False
            self.truth.garble()
        if isinstance(call, CallResume):
            self.truth.in_flight = self._random.randrange(8)
        self._perform(self.session.on_call_done(call, now_ms, result=result))

    def _injected_failure(self, call: Call) -> EngineError | None:
        behaviour = self.behaviour
        kind = type(call)
        if kind in behaviour.fail_next:
            behaviour.fail_next.discard(kind)
        elif self._random.random() >= behaviour.fail_rate.get(kind, 0.0):
            return None
        return EngineError(f"{kind.__name__} failed on purpose")

    def _end_of_life(self) -> None:
        self.alive = False
        self.process.kill()
        self.truth.running = False
        self.running_call = None
        if self._timer is not None:
            self._timer.cancel()


def _refuses(effect: SessionEffect) -> bool:
    return (
        isinstance(effect, Send)
        and isinstance(effect.message, Nack)
        and effect.message.code is NackCode.FENCED
    )
