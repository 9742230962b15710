"""The sidecar's machine: one engine's pause, memory and update, composed.

Invariants, beside those of :mod:`bus.protocol.engine_pause`,
:mod:`bus.protocol.engine_sleep` and :mod:`bus.protocol.engine_update`:

- One engine call at a time, in order; a call that is slow is still pending, and
  nothing is decided in its place.
- No resume while weights may be mixed: an engine that loaded a part of an update is
  quarantined, and stays paused until a whole one of the same target is committed.
- The door of an engine that becomes quarantined is closed: its requests end, and so does what
  reaches it from then on. Its resume opens it. A sidecar that finds it closed takes over an
  engine that is quarantined.
- Commands of an older epoch change nothing.
- With the broker silent for longer than the pause's lease, an engine that loaded
  nothing gives the update up and resumes by itself, waking what sleeps. One whose
  weights were discarded ends its requests, and sleeps on, quarantined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus.messages import (
    Abort,
    Arm,
    ChunkSent,
    Commit,
    Message,
    NackCode,
    PauseGlobal,
    PauseLocal,
    Phase,
    Probe,
    Resume,
    Sleep,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    Wake,
    WeightChunkMeta,
)
from bus.protocol.calls import (
    COMMAND_STEPS,
    Call,
    CallPause,
    CallProbe,
    CallQueue,
    CallResume,
    CallSleep,
    CallWakeWeights,
    SessionEffect,
    Told,
    nack,
)
from bus.protocol.effects import Note
from bus.protocol.engine_pause import Door, EnginePause, EnginePauseState
from bus.protocol.engine_sleep import EngineSleep
from bus.protocol.engine_update import MIXED, EngineUpdate, EngineUpdateState
from bus.protocol.instructions import Failure
from bus.protocol.refusal import Declined, wrong_state

if TYPE_CHECKING:
    from collections.abc import Iterable

# After its lease an engine resumes by itself; if its own resume fails, it tries again.
LEASE_RETRY_MS: Final = 1000.0


class EngineSession:
    """Commands and results of engine calls go in, effects come out. ``draft``: the engine has a
    draft model whose weights can be updated. ``closed``: its door is, since a sidecar before this
    one has closed it."""

    def __init__(
        self, name: str = "", *, version: int = 0, draft: bool = False, closed: bool = False
    ) -> None:
        self._queue = CallQueue()
        self.door = Door(closed)
        self.memory = EngineSleep(self._queue)
        self.pause = EnginePause(self._queue, self.memory, self.door)
        self.update = EngineUpdate(self._queue, version, name, self.door, draft=draft)
        self.epoch = 0
        self._resume_tried_ms = -LEASE_RETRY_MS
        self._forsaken = False  # asleep without weights, and nobody holds the pause any more

    @property
    def version(self) -> int:
        """The weight version that the engine serves."""
        return self.update.version

    @property
    def phase(self) -> Phase:
        """One word for heartbeats and status."""
        if self.update.state in MIXED:
            return "updating"
        if self.update.partial:
            return "emptied" if self._awaits_weights else "quarantined"
        if not self.memory.awake:
            return "asleep"
        if (
            self.pause.state is EnginePauseState.RUNNING
            and self.update.state is not EngineUpdateState.NONE
        ):
            return "armed"
        return self.pause.state.value

    @property
    def _awaits_weights(self) -> bool:
        """Its own were discarded by the sleep under way, and somebody is to bring others."""
        return self.memory.discarded and not self._forsaken

    @property
    def shown_id(self) -> str:
        """The id that belongs to :attr:`phase`."""
        if self.phase in ("updating", "armed"):
            return self.update.update_id
        return self.pause.update_id if self.pause.state is not EnginePauseState.RUNNING else ""

    def command(
        self, msg_id: int, epoch: int, message: Message, now_ms: float
    ) -> list[SessionEffect]:
        """One command of the broker."""
        try:
            if epoch < self.epoch:
                raise Declined(
                    Failure(
                        NackCode.FENCED,
                        f"epoch {epoch}, this engine has seen {self.epoch}",
                        field="epoch",
                    )
                )
            self.epoch = epoch
            return self._with_calls(self._command(msg_id, message, now_ms), now_ms)
        except Declined as declined:
            step = COMMAND_STEPS.get(type(message), "")
            update_id = getattr(message, "update_id", "")
            chunk = getattr(message, "chunk", 0)
            return [nack(msg_id, step, declined.failure, update_id, chunk)]

    def _command(self, msg_id: int, message: Message, now_ms: float) -> list[SessionEffect]:
        match message:
            case PauseLocal():
                return self.pause.local(msg_id, message, now_ms)
            case PauseGlobal():
                return self.pause.globally(msg_id, message)
            case Resume():
                if self.update.mixed and self.pause.state is not EnginePauseState.RUNNING:
                    raise wrong_state(
                        f"weights may be mixed: the engine is {self.phase}",
                        hint="COMMIT or ABORT the update first",
                    )
                return self.pause.resume(msg_id, message)
            case Sleep():
                self._need_paused(message.update_id)
                return self._sleep(msg_id, message)
            case Wake():
                self._need_paused(message.update_id)
                return self.memory.wake(msg_id, message)
            case TransferInit():
                return self.update.open(msg_id, message)
            case Arm():
                self.memory.need_weights()
                return self.update.arm(msg_id, message)
            case UpdateStart():
                paused = self.pause.state is EnginePauseState.PAUSED
                return self.update.start(msg_id, message, paused=paused)
            case WeightChunkMeta():
                return self.update.chunk(msg_id, message)
            case ChunkSent():
                return self.update.chunk(msg_id, message)
            case UpdateFinish():
                return self.update.finish(msg_id, message)
            case Probe():
                if self.pause.state is not EnginePauseState.PAUSED or not self.memory.awake:
                    raise wrong_state(f"the engine is {self.phase}; probes are run in a pause")
                return self.update.probe(msg_id, message, self.pause.made)
            case Commit():
                return self.update.commit(msg_id, message)
            case Abort() if self._left_emptied(message.update_id):
                self._forsake(msg_id)
                return []
            case Abort():
                return self.update.abort(msg_id, message)
            case _:
                raise Declined(
                    Failure(NackCode.FORBIDDEN, "an engine does not take this", field="kind")
                )

    def _sleep(self, msg_id: int, message: Sleep) -> list[SessionEffect]:
        if self.update.state is not EngineUpdateState.NONE:
            raise wrong_state(f"update {self.update.update_id} is {self.update.state.value}")
        if not self.pause.cleared:
            raise wrong_state("the pause keeps KV caches, which a sleep drops", "clear_cache")
        self._forsaken = False
        return self.memory.sleep(msg_id, message)

    def _left_emptied(self, pause_id: str) -> bool:
        """Whether an ABORT is of the pause, and no update is there that it could be of."""
        idle = self.update.state is EngineUpdateState.NONE
        return idle and self.phase == "emptied" and pause_id == self.shown_id

    def _forsake(self, msg_id: int) -> None:
        """Nobody will bring the weights that this sleep has discarded, until somebody does."""
        self._forsaken = True
        if self.update.state is EngineUpdateState.NONE:
            self.update.forsake(msg_id)

    def _need_paused(self, update_id: str) -> None:
        if self.pause.state is not EnginePauseState.PAUSED:
            raise wrong_state(f"the engine is {self.pause.state.value}, not paused")
        if update_id != self.pause.update_id:
            raise wrong_state(f"the engine is in pause {self.pause.update_id}", "update_id")

    def done(self, call: Call, now_ms: float, *, told: Told = None) -> list[SessionEffect]:
        """The running engine call has returned."""
        if isinstance(told, int) and isinstance(call, CallPause):
            self.pause.in_flight = told
        job = self._queue.end(call)
        took_ms = now_ms - job.since_ms
        if isinstance(call, CallPause):
            effects = self.pause.pause_returned(took_ms)
        elif isinstance(call, CallResume):
            effects = self.pause.resume_returned(job, took_ms, now_ms)
        elif isinstance(call, CallSleep | CallWakeWeights):
            effects = self.memory.done(job, took_ms)
        else:
            effects = self.update.done(job, took_ms, told)
        return self._with_calls(effects, now_ms)

    def failed(self, call: Call, failure: Failure, now_ms: float) -> list[SessionEffect]:
        """The running engine call has raised."""
        job = self._queue.end(call)
        if isinstance(call, CallPause):
            effects = self.pause.pause_failed(job.reply_to, failure)
        elif isinstance(call, CallResume):
            effects = self.pause.resume_failed(job, failure, now_ms)
        elif isinstance(call, CallSleep | CallWakeWeights):
            effects = self.memory.failed(job, failure)
        else:
            effects = self.update.failed(job, failure)
            if isinstance(call, CallProbe):
                self.pause.lost_track()
        return self._with_calls(effects, now_ms)

    def escalating(self, waited_for: tuple[str, ...]) -> None:
        """The escalation asked for is about to be made; these requests still ran."""
        self.pause.escalated(waited_for)

    def escalation_done(
        self, failure: Failure | None, now_ms: float, *, in_flight: int | None = None
    ) -> list[SessionEffect]:
        """The second pause call has returned, or raised."""
        if in_flight is not None:
            self.pause.in_flight = in_flight
        if failure is None:
            return self._with_calls(self.pause.pause_returned(0.0), now_ms)
        return self._with_calls(self.pause.pause_failed(0, failure), now_ms)

    # -- time -----------------------------------------------------------------

    def tick(self, heard_ms: float, now_ms: float) -> list[SessionEffect]:
        """``heard_ms`` is when the broker was last heard: the lease runs from there."""
        due_ms = self.next_deadline_ms(heard_ms)
        if due_ms is None or now_ms < due_ms:
            return []
        if self.pause.escalate_ms is not None:
            note = Note("wait_is_over", "info", {"update_id": self.pause.update_id})
            return [note, *self.pause.escalate()]
        effects: list[SessionEffect] = [
            Note(
                "lease_expired",
                "warning",
                {"update_id": self.pause.update_id, "silent_ms": round(now_ms - heard_ms)},
            )
        ]
        if self.update.state is not EngineUpdateState.NONE:
            effects += self.update.abort(0, Abort(self.update.update_id, "lease expired"))
        if not self.update.mixed:
            self._resume_tried_ms = now_ms
            self.pause.begin_resume(0)
        elif self._awaits_weights:
            self._forsake(0)
        return self._with_calls(effects, now_ms)

    def next_deadline_ms(self, heard_ms: float) -> float | None:
        """When :meth:`tick` is due; None while there is no pause that it could end."""
        if self.pause.escalate_ms is not None:
            return self.pause.escalate_ms
        if self.pause.state is not EnginePauseState.PAUSED or len(self._queue):
            return None
        broken_off = bool(self.update.partial) and self.update.state is EngineUpdateState.NONE
        if broken_off and not self._awaits_weights:
            return None  # quarantined: only a whole update ends this
        again_ms = self._resume_tried_ms + LEASE_RETRY_MS
        return max(heard_ms + self.pause.lease_ms, again_ms)

    def _with_calls(self, effects: Iterable[SessionEffect], now_ms: float) -> list[SessionEffect]:
        """Acks first, then the engine call that is to be made now."""
        calls = self._queue.issue(now_ms)
        for call in calls:
            self.update.issued(call)
        return [*effects, *calls]
