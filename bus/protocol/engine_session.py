"""The sidecar's machine: which engine call may run when, and what is acked.

Two facets. The pause::

    state     event            next      engine call, ack
    RUNNING   PAUSE_LOCAL      PAUSING   pause(mode, clear_cache); ack pause_local when issued
    PAUSING   pause returned   PAUSED    ack pause_global, if it was asked
    PAUSING   pause failed     RUNNING   nack
    PAUSED    RESUME           RESUMING  resume()
    PAUSING   RESUME           PAUSING   remembered: resume() follows the pause's return
    RESUMING  resume returned  RUNNING   ack resume
    RESUMING  resume failed    PAUSED    nack
    RESUMING  PAUSE_LOCAL      RESUMING  remembered: pause() follows the resume's return

and the update::

    state      event          next        engine call, ack
    NONE       ARM            ARMING      arm(manifest)
    ARMING     done           ARMED       ack arm
    ARMED      UPDATE_START   STARTING    start_update(recover); needs PAUSED
    STARTING   done           LOADING     ack start
    LOADING    CHUNK_META k   LOADING     receive(k), then load(k); ack chunk k
    LOADING    UPDATE_FINISH  FINISHING   finish_update()
    FINISHING  done           FINISHED    ack finish
    FINISHED   COMMIT         COMMITTING  commit(version)
    COMMITTING done           NONE        ack commit; partial is over
    any        ABORT          NONE        restore() if nothing was loaded since the start,
                                          abort_requests() if something was: partial

Invariants:

- One engine call at a time, in order; a call that is slow is still pending, and
  nothing is decided in its place.
- No resume without a completed pause, and none while weights may be mixed
  (from STARTING to COMMITTING, or ``partial``: quarantined).
- Old epochs, doubled and old commands change nothing; what was already done is
  acked again. A chunk is applied at most once.
- The version only grows, at COMMIT.
- With the broker silent for longer than the pause's lease, an engine that loaded
  nothing aborts and resumes by itself; one that loaded a part stays paused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from bus.manifest import Manifest
from bus.messages import (
    Abort,
    Ack,
    Arm,
    Commit,
    Message,
    Nack,
    NackCode,
    PauseGlobal,
    PauseLocal,
    PauseMode,
    Phase,
    Resume,
    Step,
    TransferInit,
    UpdateFinish,
    UpdateStart,
    WeightChunkMeta,
)
from bus.protocol.effects import Effect, Note, Send
from bus.protocol.instructions import Failure

if TYPE_CHECKING:
    from bus.manifest import TensorMeta


# -- engine calls: instructions to the sidecar's shell --------------------------


@dataclass(frozen=True, slots=True)
class CallPause:
    mode: PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallResume:
    pass


@dataclass(frozen=True, slots=True)
class CallOpenTransfer:
    backend: str
    params: bytes


@dataclass(frozen=True, slots=True)
class CallArm:
    manifest: Manifest
    backend: str


@dataclass(frozen=True, slots=True)
class CallStart:
    recover: bool


@dataclass(frozen=True, slots=True)
class CallReceive:
    chunk: int
    backend: str
    tensors: tuple[TensorMeta, ...]
    handle: bytes


@dataclass(frozen=True, slots=True)
class CallLoad:
    chunk: int


@dataclass(frozen=True, slots=True)
class CallRestore:
    pass


@dataclass(frozen=True, slots=True)
class CallFinish:
    pass


@dataclass(frozen=True, slots=True)
class CallCommit:
    version: int


@dataclass(frozen=True, slots=True)
class CallAbortRequests:
    pass


Call: TypeAlias = (
    CallPause
    | CallResume
    | CallOpenTransfer
    | CallArm
    | CallStart
    | CallReceive
    | CallLoad
    | CallRestore
    | CallFinish
    | CallCommit
    | CallAbortRequests
)
SessionEffect: TypeAlias = Effect | Call


class PauseFacet(StrEnum):
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"


class UpdateFacet(StrEnum):
    NONE = "none"
    ARMING = "arming"
    ARMED = "armed"
    STARTING = "starting"
    LOADING = "loading"
    FINISHING = "finishing"
    FINISHED = "finished"
    COMMITTING = "committing"
    ABORTING = "aborting"


_MIXED = frozenset(UpdateFacet) - {UpdateFacet.NONE, UpdateFacet.ARMING, UpdateFacet.ARMED}


class _Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def _wrong(detail: str, field: str = "") -> _Refused:
    return _Refused(Failure(NackCode.WRONG_STATE, detail, field=field))


@dataclass(slots=True)
class _Job:
    """One engine call with what its ack needs."""

    call: Call
    reply_to: int
    since_ms: float
    issued: bool = False


class EngineSession:
    """One engine's pause and update. Commands and call results go in, effects come out."""

    def __init__(self, *, version: int = 0) -> None:
        self.pause = PauseFacet.RUNNING
        self.update = UpdateFacet.NONE
        self.pause_id = ""
        self.update_id = ""
        self.epoch = 0
        self.version = version
        self.partial = False
        self.applied = 0
        self.in_flight = 0
        self._chunks_taken = 0
        self._loads_begun = 0
        self._manifest: Manifest | None = None
        self._backend = ""
        self._target_version = 0
        self._transfer: tuple[str, bytes] | None = None
        self._last_commit = ""
        self._last_resume = ""
        self._global_asked = 0  # message id of the PAUSE_GLOBAL to answer
        self._resume_asked = 0  # message id of the RESUME to carry out after the pause
        self._pause_waits: tuple[int, PauseLocal] | None = None
        self._abort_waits: tuple[int, Abort] | None = None
        self._lease_ms = 0.0
        self._jobs: deque[_Job] = deque()  # the first one runs

    @property
    def phase(self) -> Phase:
        """One word for heartbeats and status."""
        if self.update in _MIXED:
            return "updating"
        if self.partial:
            return "quarantined"
        if self.pause is PauseFacet.RUNNING and self.update is not UpdateFacet.NONE:
            return "armed"
        return self.pause.value

    @property
    def shown_id(self) -> str:
        """The id that belongs to :attr:`phase`."""
        if self.phase in ("updating", "armed"):
            return self.update_id
        return self.pause_id if self.pause is not PauseFacet.RUNNING else ""

    # -- commands -------------------------------------------------------------

    def command(
        self, msg_id: int, epoch: int, message: Message, now_ms: float
    ) -> list[SessionEffect]:
        """One command of the broker."""
        try:
            if epoch < self.epoch:
                raise _Refused(
                    Failure(
                        NackCode.FENCED,
                        f"epoch {epoch}, this engine has seen {self.epoch}",
                        field="epoch",
                    )
                )
            self.epoch = epoch
            return self._command(msg_id, message, now_ms)
        except _Refused as refused:
            return [self._nack(msg_id, refused.failure, message)]

    def _command(self, msg_id: int, message: Message, now_ms: float) -> list[SessionEffect]:
        if isinstance(message, PauseLocal):
            return self._pause_local(msg_id, message, now_ms)
        if isinstance(message, PauseGlobal):
            return self._pause_global(msg_id, message)
        if isinstance(message, Resume):
            return self._resume(msg_id, message, now_ms)
        if isinstance(message, TransferInit):
            if self.update in _MIXED:
                raise _wrong(f"an update is {self.update.value}")
            if self._transfer == (message.backend, message.params):
                return [self._ack(msg_id, Step.TRANSFER_INIT, "")]
            return self._call(CallOpenTransfer(message.backend, message.params), msg_id, now_ms)
        if isinstance(message, Arm):
            return self._arm(msg_id, message, now_ms)
        if isinstance(message, UpdateStart):
            return self._start(msg_id, message, now_ms)
        if isinstance(message, WeightChunkMeta):
            return self._chunk(msg_id, message, now_ms)
        if isinstance(message, UpdateFinish):
            return self._finish(msg_id, message, now_ms)
        if isinstance(message, Commit):
            return self._commit(msg_id, message, now_ms)
        if isinstance(message, Abort):
            return self._abort(msg_id, message, now_ms)
        raise _Refused(Failure(NackCode.FORBIDDEN, "an engine does not take this", field="kind"))

    def _pause_local(self, msg_id: int, message: PauseLocal, now_ms: float) -> list[SessionEffect]:
        if self.pause is PauseFacet.RESUMING:
            self._pause_waits = (msg_id, message)
            return []
        self._lease_ms = float(message.lease_ms)
        if self.pause is not PauseFacet.RUNNING:
            # Already pausing or paused: by this pause, or by one that was left behind.
            if message.update_id != self.pause_id:
                self.pause_id = message.update_id
                self._global_asked = self._resume_asked = 0
            return [self._ack(msg_id, Step.PAUSE_LOCAL, self.pause_id)]
        self.pause = PauseFacet.PAUSING
        self.pause_id = message.update_id
        self._global_asked = self._resume_asked = 0
        effects = self._call(CallPause(message.mode, message.clear_cache), msg_id, now_ms)
        return [*effects, self._ack(msg_id, Step.PAUSE_LOCAL, self.pause_id)]

    def _pause_global(self, msg_id: int, message: PauseGlobal) -> list[SessionEffect]:
        if self.pause is PauseFacet.RUNNING or message.update_id != self.pause_id:
            raise _wrong(
                f"the engine is {self.pause.value} (pause {self.pause_id or 'none'})", "update_id"
            )
        if self.pause is PauseFacet.PAUSING:
            self._global_asked = msg_id
            return []
        if self.pause is PauseFacet.RESUMING:
            raise _wrong("the engine is resuming")
        return [self._ack(msg_id, Step.PAUSE_GLOBAL, self.pause_id)]

    def _resume(self, msg_id: int, message: Resume, now_ms: float) -> list[SessionEffect]:
        if self.pause is PauseFacet.RUNNING:
            if message.update_id and message.update_id == self._last_resume:
                return [self._ack(msg_id, Step.RESUME, message.update_id)]
            raise _wrong("the engine is not paused", "update_id")
        if message.update_id != self.pause_id:
            raise _wrong(f"the engine is in pause {self.pause_id}", "update_id")
        if self.pause is PauseFacet.RESUMING:
            return []
        if self.update in _MIXED or self.partial:
            raise _wrong(f"weights may be mixed: {self.phase}; COMMIT or ABORT first")
        if self.pause is PauseFacet.PAUSING:
            self._resume_asked = msg_id
            return []
        return self._begin_resume(msg_id, now_ms)

    def _begin_resume(self, msg_id: int, now_ms: float) -> list[SessionEffect]:
        self.pause = PauseFacet.RESUMING
        return self._call(CallResume(), msg_id, now_ms)

    def _arm(self, msg_id: int, message: Arm, now_ms: float) -> list[SessionEffect]:
        if message.update_id == self.update_id and self.update is not UpdateFacet.NONE:
            if self.update is UpdateFacet.ARMING:
                return []
            return [self._ack(msg_id, Step.ARM, self.update_id)]
        if self.update not in (UpdateFacet.NONE, UpdateFacet.ARMED):
            raise _wrong(f"update {self.update_id} is {self.update.value}")
        if message.version <= self.version:
            raise _wrong(f"version {message.version}, the engine is at {self.version}", "version")
        if self._transfer is None or self._transfer[0] != message.backend:
            raise _Refused(
                Failure(
                    NackCode.TRANSFER_CLOSED,
                    f"no {message.backend} transport is open here",
                    field="backend",
                    hint="send TRANSFER_INIT first",
                )
            )
        try:
            manifest = Manifest(message.names, message.dtypes, message.shapes, message.chunk_ends)
        except ValueError as error:
            raise _Refused(Failure(NackCode.MANIFEST_REFUSED, str(error))) from error
        if manifest.digest() != message.digest:
            raise _Refused(
                Failure(NackCode.MANIFEST_REFUSED, "is not the manifest's digest", field="digest")
            )
        self.update = UpdateFacet.ARMING
        self.update_id = message.update_id
        self.applied = self._chunks_taken = self._loads_begun = 0
        self._manifest = manifest
        self._backend = message.backend
        self._target_version = message.version
        return self._call(CallArm(manifest, message.backend), msg_id, now_ms)

    def _start(self, msg_id: int, message: UpdateStart, now_ms: float) -> list[SessionEffect]:
        self._need_update(message.update_id)
        if self.update is UpdateFacet.STARTING:
            return []
        if self.update is not UpdateFacet.ARMED:
            if self.update in _MIXED:
                return [self._ack(msg_id, Step.START, self.update_id)]
            raise _wrong(f"the update is {self.update.value}, not armed")
        if self.pause is not PauseFacet.PAUSED:
            raise _wrong(f"the engine is {self.pause.value}; an update starts in a pause")
        self.update = UpdateFacet.STARTING
        return self._call(CallStart(recover=self.partial), msg_id, now_ms)

    def _chunk(self, msg_id: int, message: WeightChunkMeta, now_ms: float) -> list[SessionEffect]:
        self._need_update(message.update_id)
        if message.chunk < self.applied:
            return [self._ack(msg_id, Step.CHUNK, self.update_id, message.chunk)]
        if message.chunk < self._chunks_taken:
            return []
        if self.update is not UpdateFacet.LOADING:
            raise _wrong(f"the update is {self.update.value}, not loading")
        assert self._manifest is not None
        if message.chunk != self._chunks_taken or message.chunk >= self._manifest.chunks:
            raise _wrong(
                f"chunk {message.chunk}, expected {self._chunks_taken} of {self._manifest.chunks}",
                "chunk",
            )
        tensors = self._manifest.chunk(message.chunk)
        if tuple(t.name for t in tensors) != message.names:
            raise _Refused(
                Failure(
                    NackCode.MANIFEST_REFUSED,
                    f"chunk {message.chunk} differs from the armed manifest",
                    field="names",
                )
            )
        self._chunks_taken += 1
        receive = CallReceive(message.chunk, self._backend, tensors, message.handle)
        return [
            *self._call(receive, msg_id, now_ms),
            *self._call(CallLoad(message.chunk), msg_id, now_ms),
        ]

    def _finish(self, msg_id: int, message: UpdateFinish, now_ms: float) -> list[SessionEffect]:
        self._need_update(message.update_id)
        if self.update is UpdateFacet.FINISHING:
            return []
        if self.update in (UpdateFacet.FINISHED, UpdateFacet.COMMITTING):
            return [self._ack(msg_id, Step.FINISH, self.update_id)]
        assert self._manifest is not None
        if self.update is not UpdateFacet.LOADING or self.applied != self._manifest.chunks:
            raise _wrong(
                f"the update is {self.update.value}, {self.applied} of "
                f"{self._manifest.chunks} chunks applied"
            )
        self.update = UpdateFacet.FINISHING
        return self._call(CallFinish(), msg_id, now_ms)

    def _commit(self, msg_id: int, message: Commit, now_ms: float) -> list[SessionEffect]:
        if message.update_id and message.update_id == self._last_commit:
            return [self._ack(msg_id, Step.COMMIT, message.update_id)]
        self._need_update(message.update_id)
        if self.update is UpdateFacet.COMMITTING:
            return []
        if self.update is not UpdateFacet.FINISHED:
            raise _wrong(f"the update is {self.update.value}, not finished")
        if message.version != self._target_version:
            raise _wrong(f"armed for version {self._target_version}", "version")
        self.update = UpdateFacet.COMMITTING
        return self._call(CallCommit(message.version), msg_id, now_ms)

    def _abort(self, msg_id: int, message: Abort, now_ms: float) -> list[SessionEffect]:
        if self.update is UpdateFacet.NONE or message.update_id != self.update_id:
            outcome = "partial" if self.partial else "untouched"
            return [self._ack(msg_id, Step.ABORT, message.update_id, outcome=outcome)]
        if self.update is UpdateFacet.ABORTING:
            return []
        if self.update is UpdateFacet.COMMITTING:
            raise _wrong("the update is being committed")
        if self._jobs and not isinstance(self._jobs[0].call, (CallPause, CallResume)):
            # A call of the update runs: what it leaves behind decides. Later ones don't run.
            while len(self._jobs) > 1:
                self._jobs.pop()
            self._abort_waits = (msg_id, message)
            return []
        return self._begin_abort(msg_id, now_ms)

    def _begin_abort(self, msg_id: int, now_ms: float) -> list[SessionEffect]:
        began = self.update in _MIXED
        self.update = UpdateFacet.ABORTING
        if self._loads_begun:
            self.partial = True
            return self._call(CallAbortRequests(), msg_id, now_ms)
        if began and not self.partial:
            return self._call(CallRestore(), msg_id, now_ms)
        return self._aborted(msg_id, "partial" if self.partial else "untouched", 0.0)

    def _aborted(self, msg_id: int, outcome: str, took_ms: float) -> list[SessionEffect]:
        update_id, self.update = self.update_id, UpdateFacet.NONE
        return [self._ack(msg_id, Step.ABORT, update_id, outcome=outcome, took_ms=took_ms)]

    def _need_update(self, update_id: str) -> None:
        if self.update is UpdateFacet.NONE or update_id != self.update_id:
            raise _wrong(
                f"no such update here (it is at {self.update_id or 'none'}, {self.update.value})",
                "update_id",
            )

    # -- results of engine calls ----------------------------------------------

    def done(self, call: Call, now_ms: float) -> list[SessionEffect]:
        """The running engine call has returned."""
        job = self._jobs.popleft()
        assert job.call is call
        effects = self._done(job, now_ms - job.since_ms, now_ms)
        return effects + self._next(now_ms)

    def failed(self, call: Call, failure: Failure, now_ms: float) -> list[SessionEffect]:
        """The running engine call has raised."""
        job = self._jobs.popleft()
        assert job.call is call
        step, chunk = _step_of_call(call)
        effects: list[SessionEffect] = []
        if isinstance(call, CallPause):
            self.pause = PauseFacet.RUNNING
            reply_to = self._global_asked or job.reply_to
            effects = [self._nack_step(reply_to, Step.PAUSE_GLOBAL, failure, self.pause_id)]
            self._resume_asked = 0
        elif isinstance(call, CallResume):
            self.pause = PauseFacet.PAUSED
            effects = [self._nack_step(job.reply_to, Step.RESUME, failure, self.pause_id)]
        elif isinstance(call, CallOpenTransfer):
            self._transfer = None
            effects = [self._nack_step(job.reply_to, step, failure, "")]
        else:
            effects = self._update_call_failed(job, step, chunk, failure)
        return effects + self._next(now_ms)

    def _update_call_failed(
        self, job: _Job, step: Step, chunk: int, failure: Failure
    ) -> list[SessionEffect]:
        call = job.call
        while self._jobs:  # what was to follow it makes no sense any more
            self._jobs.pop()
        if isinstance(call, CallArm):
            self.update = UpdateFacet.NONE
        elif isinstance(call, (CallRestore, CallAbortRequests)):
            # The undoing itself failed: only a whole update brings this engine back.
            self.partial = True
            self.update = UpdateFacet.NONE
            note = Note("abort_failed", "error", {"detail": failure.detail})
            return [
                note,
                self._ack(job.reply_to, Step.ABORT, self.update_id, outcome="partial"),
            ]
        elif isinstance(call, CallStart):
            self._loads_begun = max(self._loads_begun, 1)  # half-started: not to be trusted
        elif isinstance(call, CallFinish):
            self.update = UpdateFacet.LOADING
        elif isinstance(call, CallCommit):
            self.update = UpdateFacet.FINISHED
        self._chunks_taken = self.applied
        return [self._nack_step(job.reply_to, step, failure, self.update_id, chunk)]

    def _done(self, job: _Job, took_ms: float, now_ms: float) -> list[SessionEffect]:
        call = job.call
        if isinstance(call, CallPause):
            return self._pause_returned(took_ms, now_ms)
        if isinstance(call, CallResume):
            self.pause = PauseFacet.RUNNING
            self._last_resume = self.pause_id
            return [self._ack(job.reply_to, Step.RESUME, self.pause_id, took_ms=took_ms)]
        if isinstance(call, CallOpenTransfer):
            self._transfer = (call.backend, call.params)
            return [self._ack(job.reply_to, Step.TRANSFER_INIT, "", took_ms=took_ms)]
        if isinstance(call, CallRestore):
            return self._aborted(job.reply_to, "restored", took_ms)
        if isinstance(call, CallAbortRequests):
            return self._aborted(job.reply_to, "partial", took_ms)
        return self._update_call_done(job, took_ms)

    def _pause_returned(self, took_ms: float, now_ms: float) -> list[SessionEffect]:
        self.pause = PauseFacet.PAUSED
        effects: list[SessionEffect] = []
        if self._global_asked:
            ack = self._ack(self._global_asked, Step.PAUSE_GLOBAL, self.pause_id, took_ms=took_ms)
            effects.append(ack)
            self._global_asked = 0
        if self._resume_asked:
            msg_id, self._resume_asked = self._resume_asked, 0
            effects += self._begin_resume(msg_id, now_ms)
        return effects

    def _update_call_done(self, job: _Job, took_ms: float) -> list[SessionEffect]:
        call = job.call
        if isinstance(call, CallReceive):
            return []  # its load follows, and the ack with it
        step, chunk = _step_of_call(call)
        if isinstance(call, CallArm):
            self.update = UpdateFacet.ARMED
        elif isinstance(call, CallStart):
            self.update = UpdateFacet.LOADING
        elif isinstance(call, CallLoad):
            self.applied += 1
        elif isinstance(call, CallFinish):
            self.update = UpdateFacet.FINISHED
        elif isinstance(call, CallCommit):
            self.update = UpdateFacet.NONE
            self.version = call.version
            self.partial = False
            self._last_commit = self.update_id
        return [self._ack(job.reply_to, step, self.update_id, chunk, took_ms=took_ms)]

    # -- time -----------------------------------------------------------------

    def tick(self, heard_ms: float, now_ms: float) -> list[SessionEffect]:
        """``heard_ms`` is when the broker was last heard: the lease runs from there."""
        if not self._leased() or now_ms < heard_ms + self._lease_ms:
            return []
        note = Note(
            "lease_expired",
            "warning",
            {"update_id": self.pause_id, "silent_ms": round(now_ms - heard_ms)},
        )
        effects: list[SessionEffect] = [note]
        if self.update not in (UpdateFacet.NONE, UpdateFacet.ABORTING, UpdateFacet.COMMITTING):
            effects += self._abort(0, Abort(self.update_id, "lease expired"), now_ms)
        if self.pause is PauseFacet.PAUSED and self.update not in _MIXED and not self.partial:
            effects += self._begin_resume(0, now_ms)
        return effects

    def next_deadline_ms(self, heard_ms: float) -> float | None:
        """When :meth:`tick` is due."""
        return heard_ms + self._lease_ms if self._leased() else None

    def _leased(self) -> bool:
        """Whether there is a pause that the lease could end now."""
        if self.pause is not PauseFacet.PAUSED or self._jobs:
            return False
        return not (self.partial and self.update is UpdateFacet.NONE)

    # -- small things ---------------------------------------------------------

    def _call(self, call: Call, msg_id: int, now_ms: float) -> list[SessionEffect]:
        self._jobs.append(_Job(call, msg_id, now_ms))
        return self._issue(now_ms)

    def _issue(self, now_ms: float) -> list[SessionEffect]:
        """Let the first call run, if it does not yet."""
        if not self._jobs or self._jobs[0].issued:
            return []
        job = self._jobs[0]
        job.issued = True
        job.since_ms = now_ms
        if isinstance(job.call, CallLoad):
            self._loads_begun += 1
        return [job.call]

    def _next(self, now_ms: float) -> list[SessionEffect]:
        """What was waiting for the call that has just ended."""
        effects: list[SessionEffect] = []
        if not self._jobs and self._abort_waits is not None:
            (msg_id, _), self._abort_waits = self._abort_waits, None
            if self.update is UpdateFacet.NONE:  # it ended by itself, refused or failed
                outcome = "partial" if self.partial else "untouched"
                effects.append(self._ack(msg_id, Step.ABORT, self.update_id, outcome=outcome))
            else:
                effects += self._begin_abort(msg_id, now_ms)
        if not self._jobs and self._pause_waits and self.pause is not PauseFacet.RESUMING:
            (msg_id, message), self._pause_waits = self._pause_waits, None
            return effects + self._pause_local(msg_id, message, now_ms)
        return effects + self._issue(now_ms)

    def _ack(
        self,
        reply_to: int,
        step: Step,
        update_id: str,
        chunk: int = 0,
        *,
        outcome: str = "",
        took_ms: float = 0.0,
    ) -> Send:
        ack = Ack(step, update_id, chunk, self.in_flight, round(took_ms, 3), outcome)
        return Send(ack, (), reply_to, "", self.epoch)

    def _nack(self, reply_to: int, failure: Failure, message: Message) -> Send:
        step = _STEPS.get(type(message), "")
        update_id = getattr(message, "update_id", "")
        return self._nack_step(reply_to, step, failure, update_id, getattr(message, "chunk", 0))

    def _nack_step(
        self, reply_to: int, step: str, failure: Failure, update_id: str, chunk: int = 0
    ) -> Send:
        nack = Nack(
            code=failure.code,
            step=step,
            update_id=update_id,
            chunk=chunk,
            detail=failure.detail[:4096],
            field=failure.field,
            peer="",
            tensor=failure.tensor[:512],
            hint=failure.hint,
            retry_after_ms=0,
        )
        return Send(nack, (), reply_to, "", self.epoch)


_STEPS: dict[type[Message], str] = {
    PauseLocal: Step.PAUSE_LOCAL,
    PauseGlobal: Step.PAUSE_GLOBAL,
    Resume: Step.RESUME,
    TransferInit: Step.TRANSFER_INIT,
    Arm: Step.ARM,
    UpdateStart: Step.START,
    WeightChunkMeta: Step.CHUNK,
    UpdateFinish: Step.FINISH,
    Commit: Step.COMMIT,
    Abort: Step.ABORT,
}
COMMANDS: Final = frozenset(_STEPS)
_CALL_STEPS: dict[type[Call], Step] = {
    CallPause: Step.PAUSE_GLOBAL,
    CallResume: Step.RESUME,
    CallOpenTransfer: Step.TRANSFER_INIT,
    CallArm: Step.ARM,
    CallStart: Step.START,
    CallReceive: Step.CHUNK,
    CallLoad: Step.CHUNK,
    CallRestore: Step.ABORT,
    CallFinish: Step.FINISH,
    CallCommit: Step.COMMIT,
    CallAbortRequests: Step.ABORT,
}


def _step_of_call(call: Call) -> tuple[Step, int]:
    chunk = call.chunk if isinstance(call, (CallReceive, CallLoad)) else 0
    return _CALL_STEPS[type(call)], chunk
