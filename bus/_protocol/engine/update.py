"""Updates one engine's weights: the sidecar's side.

The module :mod:`bus._protocol.engine.update_states` has its states and their table.

``partial`` is the set of parts that lack weights. An update brings one part: the model, its draft
model, or a LoRA adapter.

::

    event                                        partial        then
    an update of a model p is aborted after a
    chunk was loaded, or after its start failed  + p            quarantined
    the restore of p failed                      + p            quarantined
    admission is found closed                    + both models  quarantined
    a sleep that discards weights is called      + both models  quarantined, or weights_discarded
    ARM of any part, while partial               (same)         armed as usual
    UPDATE_START, while partial                  (same)         Start(recover)
    ABORT, nothing of p loaded, p not in it      (same)         Restore(p)
    ABORT, nothing of p loaded, p in it          (same)         no call: nothing to restore
    COMMIT of p                                  - p            whole, if it is empty now; else
                                                                the ack says "partial"

Invariants:

- A chunk is loaded at most once, in order, and only after the sender has sent all of it and its
  checksums match. (Backends of vLLM's own load what they receive, see :mod:`bus._vllm.payloads`.)
- The model is finished only when every chunk of the manifest is loaded. If the manifest is open,
  the engine's call checks first that no tensor is missing.
- The tensors of a part are received only after the engine has checked the part.
- The version changes at COMMIT only, and grows; an engine that catches up may commit its own
  version again (:mod:`bus._protocol.group.catch_up`).
- A part leaves ``partial`` only by a commit of that part. An update that begins while ``partial``
  is not empty makes the engine recover. The engine resumes only when ``partial`` is empty.
- An engine that becomes quarantined closes admission, then ends its requests, in one call. If
  admission can't be closed, no request is ended.

A **staged** update is loaded into spare memory and swapped in between two steps. Until the swap
nothing has changed: after any earlier failure the engine serves its old weights. So there is no
pause, no lease, and nothing to recover. Invariants of staging:

- An engine that lacks weights stages nothing: it must be loaded in a pause.
- The ranks of a DP group swap before the same step of their lockstep, or none of them does. The
  engines ensure this, in the agreement that they make at each step anyway. If a rank has not been
  asked yet, can't swap, or is gone, all of them stay at the old version.
- A receive over a transport of vLLM's own has no deadline. ABORT cancels it.
- A swap that waits for other ranks can be cancelled. ABORT cancels it, and so does a pause, which
  would otherwise wait for it. A swap that fails half-way counts as a load that failed half-way.

A patch changes some elements of the served weights, which must be the weights that it was computed
from: ARM of a patch is refused (``other_base``) unless the engine serves version ``base`` with
whole weights. A ``partial`` engine serves no version. An engine that has booted and committed
nothing is at version 0, which is no patch's base. Both need a whole set of weights first: a patch
neither ends a quarantine nor begins with recover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus import messages as m
from bus import operations as ops
from bus._lora import adapter_of
from bus._protocol.core.effects import Note, Send
from bus._protocol.core.failures import Failure, swap_cancelled, wrong_state
from bus._protocol.core.state_table import StateMachine
from bus._protocol.core.validation import by_digest
from bus._protocol.engine import calls as c
from bus._protocol.engine.chunks import EngineChunks
from bus._protocol.engine.transfer import EngineTransfer
from bus._protocol.engine.update_spec import UpdateSpec
from bus._protocol.engine.update_states import (
    FAILED,
    MIXED,
    NOTHING_LOADED,
    RETURNED,
    TRANSITIONS,
    EngineUpdateEvent,
    EngineUpdateState,
)
from bus._vllm.payloads import is_loaded_on_receipt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.engine.admission import Admission


_S, _E = EngineUpdateState, EngineUpdateEvent
_OfTransport: TypeAlias = m.TransferInit | m.TransferDrain


class EngineUpdate(StateMachine[EngineUpdateState, EngineUpdateEvent]):
    """Carries out updates of one engine; adds the engine calls to ``queue``."""

    def __init__(
        self, queue: c.CallQueue, version: int, name: str, admission: Admission, *, draft: bool
    ) -> None:
        super().__init__("engine update", TRANSITIONS, _S.NONE)
        self._draft = draft
        self._order = UpdateSpec()  # of the present or last update
        admission.version = version
        self.partial: set[str] = set()  # parts that lack weights
        self._admission = admission
        if admission.closed:  # which part lacks weights is unknown
            self.partial.update(("model", "draft") if draft else ("model",))
        self._queue = queue
        self._chunks = EngineChunks(queue)
        self._loaded = False  # weights may have been loaded since the start
        self.transfer = EngineTransfer(queue, name)
        self._last_commit = ""
        self.staged = False  # the present or last update is staged
        self._probed: tuple[c.CallProbe, m.Probed] | None = None  # the last probes of this update
        self._undoing: c.Call | None = None  # the call that ends requests to abort this update
        self._abort_asked: int | None = None  # id of the ABORT that waits for a call to end

    @property
    def version(self) -> int:
        """The version that the engine serves."""
        return self._admission.version

    @property
    def update_id(self) -> str:
        """The id of the present or last update."""
        return self._order.arm.update_id

    @property
    def target(self) -> m.Target:
        """The model that the update is for."""
        return self._order.arm.target

    @property
    def in_place(self) -> bool:
        """Whether an update is under way that overwrites the served weights."""
        return self.state in MIXED and not self.staged

    @property
    def is_mixed(self) -> bool:
        """Whether the model may hold weights of two versions, so that no resume may follow."""
        return bool(self.partial) or self.in_place

    @property
    def part_in_place(self) -> str:
        """The part that an update overwrites at present; empty: none."""
        return self._order.part if self.in_place else ""

    @property
    def has_loaded(self) -> bool:
        """Whether new weights of :attr:`part_in_place` are loaded, or are being loaded."""
        loads = self._loaded or isinstance(self._queue.running(), ops.LoadChunk)
        return loads and self.in_place

    @property
    def cancellable(self) -> ops.SwapStaged | ops.ReceiveChunk | None:
        """The running call that may wait for ever, and that ``CallCancel`` ends; or None."""
        return self._queue.cancellable()

    def about_to_serve(self, version: int) -> bool:
        """Returns whether the engine has staged this version or a later one."""
        waits = self.staged and self.state in (_S.FINISHED, _S.COMMITTING)
        return waits and self._order.arm.version >= version

    def on_found(self, partial: Iterable[str]) -> None:
        """Records that the engine was found without an update, lacking weights of these parts."""
        self._go(_E.FOUND)
        self.partial = set(partial)
        self._admission.closed |= bool(self.partial)

    # -- commands -------------------------------------------------------------

    def open(self, msg_id: int, message: _OfTransport) -> list[c.SessionEffect]:
        """Executes a TRANSFER_INIT or TRANSFER_DRAIN, whose message id is ``msg_id``."""
        if self.staged and self.state in MIXED and not self.transfer.is_open(message):
            return self.give_way("the broker opens another transport")
        if self.state in MIXED:  # the broker has ended that update, and is about to abort it here
            return []  # the message is repeated
        return self.transfer.open(msg_id, message)

    def arm(self, msg_id: int, message: m.Arm) -> list[c.SessionEffect]:
        """Executes an ARM, whose message id is ``msg_id``."""
        if message.update_id == self.update_id and self.state not in (_S.NONE, _S.ABORTING):
            return [] if self.state is _S.ARMING else [self._order.ack(msg_id)]
        if self._abort_asked is not None or self.state is _S.ABORTING:
            return []  # the abort comes first; ARM is repeated
        if self.state in MIXED and message.version > self._order.arm.version:  # ABORT is under way
            return self.give_way("the broker arms a later update") if self.staged else []
        if self.state not in (_S.NONE, _S.ARMED):
            raise wrong_state(f"the engine's update {self.update_id} is {self.state.value}")
        if not message.scope and message.version <= self.version:  # a catch-up may go back
            raise wrong_state(
                f"version {message.version} is not above the engine's {self.version}", "version"
            )
        order = UpdateSpec(by_digest(message))
        order.require_target(draft=self._draft)
        manifest = self._chunks.manifest_of(message)
        order.require_base(self.version, self.partial)
        self.transfer.require(message)
        stale = message.after != self.version
        call = ops.ArmManifest(manifest, message.target, message.staging, stale, message.digest)
        effects = self._begin(_E.ARM_ASKED, call, msg_id)
        self._order = order
        self._chunks.begin(message, manifest)
        self._loaded = self.staged = False
        self._probed = None
        return effects

    def give_way(self, why: str) -> list[c.SessionEffect]:
        """Aborts the update, because a new command (``why``) shows that the broker ended it."""
        return [] if self.state is _S.ABORTING else self.abort(0, m.Abort(self.update_id, why))

    def start(self, msg_id: int, message: m.UpdateStart, *, paused: bool) -> list[c.SessionEffect]:
        """Executes an UPDATE_START with the id ``msg_id``; ``paused``: the engine is paused."""
        self._require(message.update_id)
        if self.state is _S.STARTING:
            return []
        if self.state in MIXED:
            return [c.ack(msg_id, m.Step.START, self.update_id)]
        self._require_state(_S.ARMED)
        if message.staged:
            self._order.require_room(self.partial)
        elif not paused:
            raise wrong_state("the engine runs; an update starts in a pause, or is staged")
        self._order.require_base(self.version, self.partial)
        self._require_kept()
        self.transfer.require(self._order.arm)
        call = ops.Start(self.target, bool(self.partial), staged=message.staged)
        effects = self._begin(_E.START_ASKED, call, msg_id)
        self.staged = self._chunks.staged = message.staged
        return effects

    def chunk(self, msg_id: int, message: m.WeightChunkMeta | m.ChunkSent) -> list[c.SessionEffect]:
        """Executes a WEIGHT_CHUNK_META or CHUNK_SENT, whose message id is ``msg_id``."""
        self._require(message.update_id)
        if self._chunks.is_new(message):
            self._require_state(_S.STARTING, _S.LOADING)
            self._require_kept()
        return self._chunks.take(msg_id, message)

    def extend(self, msg_id: int, message: m.ArmPart) -> list[c.SessionEffect]:
        """Executes an ARM_PART, whose message id is ``msg_id``."""
        self._require(message.update_id)
        if self.state is _S.EXTENDING:
            return []
        self._require_state(_S.LOADING)
        if message.part < self._chunks.parts:
            return [c.ack(msg_id, m.Step.PART, self.update_id)]
        part = self._chunks.extend(message)
        return [] if part is None else self._begin(_E.PART_ASKED, ops.Extend(part), msg_id)

    def finish(self, msg_id: int, message: m.UpdateFinish) -> list[c.SessionEffect]:
        """Executes an UPDATE_FINISH, whose message id is ``msg_id``."""
        self._require(message.update_id)
        if self.state is _S.FINISHING:
            return []
        if self.state in (_S.FINISHED, _S.PROBING, _S.COMMITTING):
            return [c.ack(msg_id, m.Step.FINISH, self.update_id)]
        self._require_state(_S.LOADING)
        if not self._chunks.has_sent_all:  # a CHUNK_SENT was lost: the broker repeats it
            return []
        return self._begin(_E.FINISH_ASKED, ops.Finish(staged=self.staged), msg_id)

    def probe(self, msg_id: int, message: m.Probe, pause: c.CallPause) -> list[c.SessionEffect]:
        """Executes a PROBE. The caller has checked that the engine is paused by ``pause``."""
        self._require(message.update_id)
        if self.state is _S.PROBING:
            return []
        if self.state is not _S.FINISHED or self.staged:
            is_staged = ", and staged" if self.staged else ""
            raise wrong_state(f"the update is {self.state.value}{is_staged}, not finished")
        call = c.CallProbe(
            message.prompts, message.max_tokens, message.salt, pause.mode, pause.clear_cache
        )
        if self._probed is not None and self._probed[0] == call:
            return [Send(self._probed[1], reply_to=msg_id)]
        return self._begin(_E.PROBE_ASKED, call, msg_id)

    def commit(
        self, msg_id: int, message: m.Commit, *, swaps: bool = True
    ) -> list[c.SessionEffect]:
        """Executes a COMMIT. ``swaps``: the engine runs, so it can swap between two steps."""
        if message.update_id and message.update_id == self._last_commit:
            return [self._commit_ack(msg_id)]
        self._require(message.update_id)
        if self.state is _S.COMMITTING:
            return []
        self._require_state(_S.FINISHED)
        if message.version != self._order.arm.version:
            raise wrong_state(f"the update has version {self._order.arm.version}", "version")
        if not self.staged:
            return self._begin(_E.COMMIT_ASKED, c.CallCommit(message.version), msg_id)
        if (staging := self._order.arm.staging) is None or not swaps:
            raise swap_cancelled("a paused rank runs no steps, so it can't swap between two")
        call = ops.SwapStaged(message.version, staging.clear_cache)
        return self._begin(_E.COMMIT_ASKED, call, msg_id)

    def abort(self, msg_id: int, message: m.Abort) -> list[c.SessionEffect]:
        """Executes an ABORT, whose message id is ``msg_id``."""
        unknown = self.state is _S.NONE or message.update_id != self.update_id
        if unknown and not isinstance(self._queue.running(), _OF_TRANSPORTS):
            outcome = self._or_partial("untouched")
            return [c.ack(msg_id, m.Step.ABORT, message.update_id, outcome=outcome)]
        if unknown or self.state is _S.ABORTING:  # that call or abort ends first; ABORT is repeated
            return []
        if self.state is _S.COMMITTING and not self.staged:
            raise wrong_state("the update is being committed, so it can't be aborted")
        self._queue.drop_waiting()
        if isinstance(self._queue.running(), _UPDATE_CALLS):
            self._abort_asked = msg_id
            return [c.CallCancel()] if self.cancellable else []
        return self._begin_abort(msg_id)

    # -- results --------------------------------------------------------------

    def on_call_done(
        self, job: c.Job, took_ms: float, result: c.CallResult = None
    ) -> list[c.SessionEffect]:
        """Handles the return of one of the update's calls, with its ``result``."""
        call = job.call
        if isinstance(call, ops.ReceiveChunk):
            return self._run_waiting_abort(self._chunks.on_received())
        if isinstance(call, _OF_TRANSPORTS):
            if isinstance(result, ops.Done) and isinstance(call, ops.Open):
                self._chunks.prefetch_depth = result.ahead
            return self._run_waiting_abort([self.transfer.on_done(job.reply_to, call, took_ms)])
        if self._is_for_peer(job):
            return self._run_waiting_abort([])
        if isinstance(call, (ops.Restore, c.CallAbortRequests)):
            outcome = self._or_partial("untouched" if self.staged else "restored")
            return self._ack_abort(job.reply_to, outcome, took_ms)
        if isinstance(call, ops.ArmManifest):
            self._go(_E.ARM_RETURNED)
            if isinstance(result, ops.Done) and result.room is not None:
                self._order.has_room(result.room, self.partial, took_ms)
            return self._run_waiting_abort([self._order.ack(job.reply_to, took_ms)])
        if type(call) in RETURNED:
            self._go(RETURNED[type(call)])
        if isinstance(call, ops.Extend):
            self._chunks.on_extended()
        elif isinstance(call, ops.LoadChunk):
            self._chunks.on_loaded()
            self._lost_the_old()
        elif isinstance(call, c.CallProbe):
            self._go(_E.PROBE_ENDED)
            results = result if isinstance(result, tuple) else ()
            self._probed = (call, m.Probed(self.update_id, results, round(took_ms, 3)))
            return self._run_waiting_abort([Send(self._probed[1], reply_to=job.reply_to)])
        elif isinstance(call, c.CallCommit | ops.SwapStaged):
            self._go(_E.COMMIT_RETURNED)
            self._admission.version = call.version
            self.partial.discard(self._order.part)
            self._last_commit = self.update_id
            count = result.in_flight if isinstance(result, ops.Done) else 0
            return self._run_waiting_abort([self._commit_ack(job.reply_to, took_ms, count)])
        step, chunk = c.CALL_STEPS[type(call)], getattr(call, "seq", 0)
        return self._run_waiting_abort(
            [c.ack(job.reply_to, step, self.update_id, chunk=chunk, took_ms=took_ms)]
        )

    def _is_for_peer(self, job: c.Job) -> bool:
        """Returns whether the call ends requests for another reason than to undo the update."""
        return isinstance(job.call, c.CallAbortRequests) and job.call is not self._undoing

    def on_call_failed(self, job: c.Job, failure: Failure) -> list[c.SessionEffect]:
        """Handles the failure of one of the update's calls; drops the calls after it."""
        call = job.call
        step = c.CALL_STEPS[type(call)]
        if isinstance(call, _OF_TRANSPORTS):  # later calls don't depend on it
            self.transfer.on_failed()
            return self._run_waiting_abort([c.nack(job.reply_to, step, failure, call.update_id)])
        if self._is_for_peer(job):
            self._admission.unconfirmed = True
            return [Note("abort_failed", "error", {"detail": failure.detail})]
        self._queue.drop_waiting()
        self._chunks.discard()
        chunk = call.seq if isinstance(call, ops.ReceiveChunk | ops.LoadChunk) else 0
        if isinstance(call, (ops.Restore, c.CallAbortRequests)):
            # The undo itself failed: only a whole update ends this engine's quarantine.
            note = Note("abort_failed", "error", {"detail": failure.detail})
            if isinstance(call, ops.Restore) and self.staged:  # the served weights are whole
                return [note, *self._ack_abort(job.reply_to, self._or_partial("untouched"), 0.0)]
            if isinstance(call, ops.Restore):
                self.partial.add(self._order.part)
                self._undoing = self._queue.add(c.CallAbortRequests(), job.reply_to)
                return [note]
            return [note, *self._ack_abort(job.reply_to, "partial", 0.0)]
        if isinstance(call, ops.SwapStaged) and failure.code is not m.NackCode.CALLED_OFF:
            return self._on_half_swapped(job, failure)
        if type(call) in FAILED:
            self._go(FAILED[type(call)])
        elif isinstance(call, ops.Start):
            self._lost_the_old()  # a half-started update may have changed weights
        elif isinstance(call, ops.LoadChunk) and failure.code not in NOTHING_LOADED:
            self._lost_the_old()
        if self.state is _S.FINISHING:
            self._go(_E.FINISH_FAILED)
        return self._run_waiting_abort([c.nack(job.reply_to, step, failure, self.update_id, chunk)])

    def _on_half_swapped(self, job: c.Job, failure: Failure) -> list[c.SessionEffect]:
        """Handles a swap that failed half-way: some of the served weights may be new."""
        self._go(_E.HALF_SWAPPED)
        self.partial.add(self._order.part)
        reply_to, self._abort_asked = self._abort_asked or 0, None
        self._undoing = self._queue.add(c.CallAbortRequests(), reply_to)
        return [c.nack(job.reply_to, m.Step.COMMIT, failure, self.update_id)]

    def on_issued(self, call: object) -> None:
        """Records, before an engine call is made, its effect on weights and admission."""
        if isinstance(call, ops.ReceiveChunk) and is_loaded_on_receipt(call.backend):
            self._lost_the_old()
        elif isinstance(call, c.CallAbortRequests):
            self._admission.closed = True
            self._admission.unconfirmed = False
        elif isinstance(call, c.CallSleep) and call.level == 2:  # noqa: PLR2004 - the level
            self.partial.add("model")
            if self._draft:
                self.partial.add("draft")

    def abandon_discarded_weights(self) -> None:
        """Quarantines the engine: no trainer replaces the weights that a sleep has discarded."""
        self._go(_E.WEIGHTS_ABANDONED)
        self._undoing = self._queue.add(c.CallAbortRequests(), 0)

    # -- internal -------------------------------------------------------------

    def _begin(self, event: EngineUpdateEvent, call: c.Call, msg_id: int) -> list[c.SessionEffect]:
        """Begins the next step, which is acknowledged when its call returns."""
        self._require_kept()
        self._go(event)
        self._queue.add(call, msg_id)
        return []

    def _require_state(self, *states: EngineUpdateState) -> None:
        if self.state not in states:
            raise wrong_state(f"the update is {self.state.value}, not {' or '.join(states)}")

    def _require_kept(self) -> None:
        if self._abort_asked is not None:
            raise wrong_state("the update ends as soon as the running call returns")

    def _lost_the_old(self) -> None:
        """Records that new weights may have been loaded over the old ones.

        Not so for an adapter, whose predecessor is kept, nor for a staged update.
        """
        self._loaded = not (self.staged or adapter_of(self._order.arm.backend))

    def _run_waiting_abort(self, effects: list[c.SessionEffect]) -> list[c.SessionEffect]:
        """Executes the ABORT that has waited for the end of a call."""
        if self._abort_asked is None:
            return effects
        msg_id, self._abort_asked = self._abort_asked, None
        if self.state is _S.NONE:  # ended already: refused, or committed (staged)
            made = self.update_id == self._last_commit
            outcome = self._or_partial("committed" if made else "untouched")
            return [*effects, c.ack(msg_id, m.Step.ABORT, self.update_id, outcome=outcome)]
        return [*effects, *self._begin_abort(msg_id)]

    def _begin_abort(self, msg_id: int) -> list[c.SessionEffect]:
        began = self.state in MIXED
        self._go(_E.GIVEN_UP)
        if self._loaded:
            self.partial.add(self._order.part)
            self._undoing = self._queue.add(c.CallAbortRequests(), msg_id)
            return []
        if began and self._order.part not in self.partial:
            self._queue.add(ops.Restore(self.target, self.staged), msg_id)
            return []
        return self._ack_abort(msg_id, self._or_partial("untouched"), 0.0)

    def _ack_abort(self, msg_id: int, outcome: str, took_ms: float) -> list[c.SessionEffect]:
        self._go(_E.UNDONE)
        return [c.ack(msg_id, m.Step.ABORT, self.update_id, outcome=outcome, took_ms=took_ms)]

    def _or_partial(self, outcome: str) -> str:
        return "partial" if self.partial else outcome

    def _commit_ack(self, msg_id: int, took_ms: float = 0.0, count: int = 0) -> c.SessionEffect:
        step, made, outcome = m.Step.COMMIT, self._last_commit, self._or_partial("")
        return c.ack(msg_id, step, made, in_flight=count, took_ms=took_ms, outcome=outcome)

    def _require(self, update_id: str) -> None:
        if self.state is _S.NONE or update_id != self.update_id:
            last = f"its last one is {self.update_id or 'none'}, {self.state.value}"
            raise wrong_state(f"the engine has no such update; {last}", "update_id")


_OF_TRANSPORTS: Final = (ops.Open, ops.Drain)
_UPDATE_CALLS: Final = (
    *_OF_TRANSPORTS,
    ops.ArmManifest,
    ops.Extend,
    ops.Start,
    ops.ReceiveChunk,
    ops.LoadChunk,
    ops.Finish,
    c.CallProbe,
    ops.SwapStaged,
)
