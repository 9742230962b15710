"""The sidecar's state machine for one engine: composes its pause, memory and update.

Invariants, beside those of :mod:`bus._protocol.engine.pause`,
:mod:`bus._protocol.engine.memory` and :mod:`bus._protocol.engine.update`:

- Engine calls run one at a time, in order. A slow call stays pending; no other call is made in its
  place.
- No resume while weights may be mixed: an engine that loaded a part of an update is
  quarantined, and stays paused until a whole update of the same target is committed.
- An engine closes admission when it becomes quarantined, or when it runs and its group serves a
  later version: its requests end, and new ones are rejected. The resume after a whole update to the
  group's version opens admission. A staged update has no resume, so admission opens before its
  commit is acknowledged. A sidecar that finds admission closed treats the engine as quarantined.
- Commands of an older epoch change nothing.
- When the pause's lease is over, an engine that loaded nothing aborts the update, which restores
  its old weights, wakes what sleeps, and resumes. Of a DP group, the cores decide whether all ranks
  resume (:mod:`bus._protocol.engine.lease`). An engine that loaded a part, or whose weights are
  discarded, ends its requests and stays paused or asleep, quarantined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus import messages as m
from bus import operations as ops
from bus._protocol.core.effects import Note, Send
from bus._protocol.core.failures import Declined, Failure, decline, wrong_state
from bus._protocol.engine import calls as c
from bus._protocol.engine.admission import Admission
from bus._protocol.engine.lease import LEASE_RETRY_MS, EngineLease, LeaseState
from bus._protocol.engine.memory import EngineMemory
from bus._protocol.engine.pause import EnginePause, EnginePauseState
from bus._protocol.engine.update import EngineUpdate
from bus._protocol.engine.update_states import MIXED, EngineUpdateState

if TYPE_CHECKING:
    from collections.abc import Iterable


class EngineSession:
    """Drives one engine. Methods take commands and results of engine calls, and return effects.

    ``draft``: the engine has a draft model whose weights can be updated. ``closed``: an earlier
    sidecar has closed the engine's admission.
    """

    def __init__(
        self,
        name: str = "",
        *,
        version: int = 0,
        draft: bool = False,
        closed: bool = False,
        dp_size: int = 1,
    ) -> None:
        self._queue = c.CallQueue()
        self.admission = Admission(closed)
        self.memory = EngineMemory(self._queue)
        self.lease = EngineLease(has_peers=dp_size > 1)
        self.pause = EnginePause(self._queue, self.memory, self.lease, self.admission)
        self.update = EngineUpdate(self._queue, version, name, self.admission, draft=draft)
        self.epoch = 0
        self._waits_for_admission: list[c.SessionEffect] = []
        self._abandoned = False  # asleep without weights, and no trainer holds the pause

    @property
    def version(self) -> int:
        """The version that the engine serves."""
        return self.admission.version

    @property
    def is_stale(self) -> bool:
        """Whether the engine lacks weights of its group's version, so that it must not serve."""
        return bool(self.update.partial) or self.admission.is_stale

    @property
    def phase(self) -> m.Phase:
        """The engine's state in one word, for heartbeats and status."""
        if self.update.in_place:
            return "updating"
        if self.update.partial:
            return "weights_discarded" if self._awaits_weights else "quarantined"
        if not self.memory.awake:
            return "asleep"
        if (
            self.pause.state is EnginePauseState.RUNNING
            and self.update.state is not EngineUpdateState.NONE
        ):
            return "staging" if self.update.state in MIXED else "armed"
        return self.pause.state.value

    @property
    def _awaits_weights(self) -> bool:
        """Whether a sleep has discarded the weights, and an update may still bring new ones."""
        return self.memory.has_discarded_weights and not self._abandoned

    def beat(self) -> m.Heartbeat:
        """Returns a heartbeat with the engine's state."""
        in_flight, closed = self.pause.in_flight, self.admission.closed
        return m.Heartbeat(self.phase, self.version, in_flight, self.shown_id, closed)

    @property
    def shown_id(self) -> str:
        """The id of the pause or update to which :attr:`phase` refers; empty without one."""
        if self.phase in ("updating", "armed", "staging"):
            return self.update.update_id
        return self.pause.update_id if self.pause.state is not EnginePauseState.RUNNING else ""

    def command(
        self, msg_id: int, epoch: int, message: m.Message, now_ms: float
    ) -> list[c.SessionEffect]:
        """Executes a command of the broker, sent with the id ``msg_id`` under this ``epoch``."""
        try:
            if epoch < self.epoch:
                raise decline(
                    m.NackCode.FENCED,
                    f"the command has epoch {epoch}, and this engine has received {self.epoch}",
                    field="epoch",
                )
            self.epoch = epoch
            return self._with_calls(self._command(msg_id, message, now_ms), now_ms)
        except Declined as declined:
            step = m.STEPS.get(type(message), "")
            update_id = getattr(message, "update_id", "")
            chunk = getattr(message, "chunk", 0)
            return [c.nack(msg_id, step, declined.failure, update_id, chunk)]

    def _command(self, msg_id: int, message: m.Message, now_ms: float) -> list[c.SessionEffect]:
        match message:
            case m.PauseLocal():
                return [*self.pause.local(msg_id, message, now_ms), *self._pause_first()]
            case m.PauseGlobal():
                return self.pause.globally(msg_id, message)
            case m.Resume():
                if self.update.is_mixed and self.pause.state is not EnginePauseState.RUNNING:
                    raise wrong_state(
                        f"weights may be mixed: the engine is {self.phase}",
                        hint="COMMIT or ABORT the update first",
                    )
                self.admission.group_version = max(self.admission.group_version, message.version)
                return self.pause.resume(msg_id, message)
            case m.Sleep():
                self._require_paused(message.update_id)
                self._require_lease()
                return self._sleep(msg_id, message)
            case m.Wake():
                self._require_paused(message.update_id)
                return self.memory.wake(msg_id, message)
            case m.TransferInit() | m.TransferDrain():
                return self.update.open(msg_id, message)
            case m.Arm():
                self.memory.need_weights()
                return self.update.arm(msg_id, message)
            case m.UpdateStart():
                self._require_lease()
                paused = self.pause.state is EnginePauseState.PAUSED
                return self.update.start(msg_id, message, paused=paused)
            case m.WeightChunkMeta() | m.ChunkSent():
                return self.update.chunk(msg_id, message)
            case m.ArmPart():
                return self.update.extend(msg_id, message)
            case m.UpdateFinish():
                return self.update.finish(msg_id, message)
            case m.Probe():
                if self.pause.state is not EnginePauseState.PAUSED or not self.memory.awake:
                    raise wrong_state(f"the engine is {self.phase}; probes are run in a pause")
                return self.update.probe(msg_id, message, self.pause.effective_call)
            case m.Commit() if self._waits_for_admission:
                return []  # answered once admission is open
            case m.Commit():
                runs = self.pause.state is EnginePauseState.RUNNING
                return self.update.commit(msg_id, message, swaps=runs or not self.lease.has_peers)
            case m.Abort():
                return self.update.abort(msg_id, message)
            case _:
                raise decline(
                    m.NackCode.FORBIDDEN, "an engine does not accept this message", field="kind"
                )

    def _pause_first(self) -> list[c.SessionEffect]:
        """Cancels a swap that waits for peer ranks, because the swap would delay the pause."""
        swaps = isinstance(self.update.cancellable, ops.SwapStaged)
        return [c.CallCancel()] if self.lease.has_peers and swaps else []

    def _sleep(self, msg_id: int, message: m.Sleep) -> list[c.SessionEffect]:
        if self.update.state is not EngineUpdateState.NONE:
            return self.update.give_way("the broker has no update under way, and requests a sleep")
        self._abandoned = False
        return self.memory.sleep(msg_id, message, clears=not self.pause.clears_cache)

    def _require_lease(self) -> None:
        if self.lease.state is LeaseState.OVER:
            raise wrong_state("the pause's lease has expired; the engine is about to resume")

    def _require_paused(self, update_id: str) -> None:
        if self.pause.state is not EnginePauseState.PAUSED:
            raise wrong_state(f"the engine is {self.pause.state.value}, not paused")
        if update_id != self.pause.update_id:
            raise wrong_state(f"the engine is in pause {self.pause.update_id}", "update_id")

    def on_call_done(
        self, call: c.Call, now_ms: float, *, result: c.CallResult = None
    ) -> list[c.SessionEffect]:
        """Handles the return of the running engine call, with its ``result``."""
        if isinstance(result, int) and isinstance(call, c.CallPause):
            self.pause.in_flight = result
        job = self._queue.end(call)
        took_ms = now_ms - job.since_ms
        if isinstance(call, c.CallPause):
            effects = self.pause.on_paused(took_ms)
        elif isinstance(call, c.CallStrengthenPause):
            effects = self.pause.on_strengthened(took_ms)
        elif isinstance(call, c.CallResume):
            effects = self.pause.on_resumed(job, took_ms, now_ms)
        elif isinstance(call, c.CallSleep | c.CallWakeWeights):
            effects = self.memory.on_call_done(job, took_ms)
        elif isinstance(call, c.CallAdmit):
            self.admission.closed = self.admission.unconfirmed = False
            effects = [*self._take_waiting_for_admission(), Send(self.beat())]
        else:
            effects = self.update.on_call_done(job, took_ms, result)
        if isinstance(call, ops.SwapStaged):  # no resume follows to open admission
            effects = self._admit_first(effects)
        elif isinstance(call, c.CallResume | ops.Restore) or not self.admission.unconfirmed:
            effects += self._update_admission()  # the group's version may have risen meanwhile
        return self._with_calls(effects, now_ms)

    def on_call_failed(
        self, call: c.Call, failure: Failure, now_ms: float
    ) -> list[c.SessionEffect]:
        """Handles the failure of the running engine call."""
        job = self._queue.end(call)
        if isinstance(call, c.CallPause):
            effects = self.pause.on_pause_failed(job.reply_to, failure)
        elif isinstance(call, c.CallStrengthenPause):
            effects = self.pause.on_strengthen_failed(job.reply_to, failure)
        elif isinstance(call, c.CallResume):
            effects = self.pause.on_resume_failed(job, failure, now_ms)
        elif isinstance(call, c.CallSleep | c.CallWakeWeights):
            effects = self.memory.on_call_failed(job, failure)
        elif isinstance(call, c.CallAdmit):
            note = Note("open_failed", "warning", {"detail": failure.detail})
            effects = [note, *self._take_waiting_for_admission()]
        else:
            effects = self.update.on_call_failed(job, failure)
            if isinstance(call, c.CallProbe):
                self.pause.on_probe_failed()
            elif isinstance(call, ops.Restore) or not self.admission.unconfirmed:
                effects += self._update_admission()
        return self._with_calls(effects, now_ms)

    def on_escalation_done(
        self, failure: Failure | None, now_ms: float, *, in_flight: int | None = None
    ) -> list[c.SessionEffect]:
        """Handles the end of the escalation's pause call; ``failure`` says why it failed."""
        if in_flight is not None:
            self.pause.in_flight = in_flight
        if failure is None:
            return self._with_calls(self.pause.on_paused(0.0), now_ms)
        return self._with_calls(self.pause.on_pause_failed(0, failure), now_ms)

    # -- a found state ----------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether no engine call runs or waits."""
        return not (len(self._queue) or self.pause.pending)

    def on_found_paused(
        self,
        pause_id: str,
        lease_ms: float,
        now_ms: float,
        *,
        partial: Iterable[str],
        asleep: bool,
    ) -> None:
        """Records a pause of an earlier sidecar, or one that the engine began itself.

        Requires :attr:`at_rest`. ``partial``: the parts without weights. ``asleep``: memory sleeps.
        """
        self.pause.on_found_paused(pause_id, lease_ms, now_ms)
        self.update.on_found(partial)
        if asleep:
            self.memory.found_asleep()

    def on_core_resumed(self, now_ms: float) -> list[c.SessionEffect]:
        """Records that the engine has resumed by itself, with whole weights.

        Requires :attr:`at_rest`.
        """
        if self.update.state is not EngineUpdateState.ARMED:  # that is a later update
            self.update.on_found(())
        self.pause.found_running()
        return self._with_calls(self._update_admission(), now_ms)

    def on_core_quarantined(self, now_ms: float) -> list[c.SessionEffect]:
        """Records that the engine (:attr:`at_rest`) stays paused, since some rank lacks weights.

        The cores decide when the lease of one rank's pause is over. If this rank is in a later
        pause by then, the broker controls that pause, and its lease goes on.
        """
        effects: list[c.SessionEffect] = []
        over_ms = self.lease.over_ms
        if part := self.update.part_in_place:  # the core could not undo it
            partial, asleep = {*self.update.partial, part}, not self.memory.awake
            self.on_found_paused(self.pause.update_id, 0.0, now_ms, partial=partial, asleep=asleep)
        elif over_ms is None or now_ms >= over_ms:
            if self.lease.state is LeaseState.HELD:
                self.lease.run_out()
            effects = self._stay()
        elif self.admission.closed:
            return []
        self._queue.add(c.CallAbortRequests(), 0)  # closes admission
        return self._with_calls(effects, now_ms)

    # -- time -----------------------------------------------------------------

    def tick(self, now_ms: float) -> list[c.SessionEffect]:
        """Escalates a `wait` pause, or ends a lease, if its time is over."""
        due_ms = self.next_deadline_ms()
        if due_ms is None or now_ms < due_ms:
            return []
        if self.pause.escalate_ms is not None:
            note = Note("wait_is_over", "info", {"update_id": self.pause.update_id})
            return [note, *self.pause.escalate()]
        effects: list[c.SessionEffect] = []
        if self.lease.state is LeaseState.HELD:
            fields = {"update_id": self.pause.update_id, "phase": self.phase}
            effects.append(Note("lease_expired", "warning", fields))
            self.lease.run_out()
        return self._with_calls([*effects, *self._end_lease(now_ms)], now_ms)

    def next_deadline_ms(self) -> float | None:
        """Returns when :meth:`tick` is due; None: no lease or escalation is pending."""
        if self.pause.escalate_ms is not None:
            return self.pause.escalate_ms
        if not self._lease_counts:
            return None
        return self.lease.over_ms if self.lease.state is LeaseState.HELD else self.lease.again_ms

    def held_for_ms(self, now_ms: float) -> float:
        """Returns for how many ms the engine core waits for this sidecar before resuming itself.

        The core waits until the lease is over. It then gives the sidecar some time to undo the
        update, and to resume an engine without peer ranks. The number is negative once nothing is
        left to undo and the cores of a DP group may decide.
        """
        left_ms = self.lease.ran_out_ms - now_ms
        calls = len(self._queue) and self.pause.state is not EnginePauseState.PAUSING
        undone = not (self.update.in_place or self.update.partial or calls)
        if self.lease.is_decided_by_cores and undone:
            return left_ms
        left_ms = left_ms if self.lease.state is LeaseState.HELD else LEASE_RETRY_MS
        return max(left_ms, 0.0) + 2 * LEASE_RETRY_MS

    @property
    def _lease_counts(self) -> bool:
        """Whether the lease may end the pause; during the pause call, only with peer ranks."""
        if self.pause.state is EnginePauseState.PAUSING:
            return self.lease.has_peers
        paused = self.pause.state in (EnginePauseState.PAUSED, EnginePauseState.UNKNOWN)
        return paused and not len(self._queue)

    def on_lease_renewed(self, epoch: int, pause_id: str, now_ms: float) -> None:
        """Renews the lease of this pause, because the broker still keeps the pause."""
        if pause_id and pause_id == self.pause.update_id and epoch >= self.epoch:
            self.lease.renew(now_ms)

    def on_group_version(self, group_version: int, now_ms: float) -> list[c.SessionEffect]:
        """Closes admission if the engine is older than its group; otherwise opens admission."""
        self.admission.group_version = group_version
        return self._with_calls(self._update_admission(), now_ms)

    def _update_admission(self) -> list[c.SessionEffect]:
        admission = self.admission
        if self.pause.state is not EnginePauseState.RUNNING or not self.at_rest:
            return []
        if self.update.about_to_serve(admission.group_version):
            return []
        if self.is_stale and (admission.unconfirmed or not admission.closed):
            self._queue.add(c.CallAbortRequests(), 0)
            stale = Note("closed_stale", "warning", self._versions)
            return [] if admission.unconfirmed else [stale]
        if admission.closed and not self.is_stale:
            self._queue.add(c.CallAdmit(), 0)
            return [self._admitting_note()]
        return []

    def _admitting_note(self) -> Note:
        return Note("opened", "info", self._versions)

    @property
    def _versions(self) -> dict[str, object]:
        return {"version": self.version, "group_version": self.admission.group_version}

    def _admit_first(self, effects: list[c.SessionEffect]) -> list[c.SessionEffect]:
        """Opens admission before other waiting calls, then acknowledges the commit.

        A waiting pause then holds new requests, which closed admission would reject.
        """
        if self.is_stale or not self.admission.closed:
            return effects + self._update_admission()
        self._queue.add_first(c.CallAdmit(), 0)
        self._waits_for_admission = effects
        return [self._admitting_note()]

    def _take_waiting_for_admission(self) -> list[c.SessionEffect]:
        effects, self._waits_for_admission = self._waits_for_admission, []
        return effects

    def _end_lease(self, now_ms: float) -> list[c.SessionEffect]:
        """Aborts the update of the pause; then resumes, or stays paused without whole weights.

        With peer ranks, a pause of whole weights is left to the engine cores.
        """
        self.lease.record_attempt(now_ms)
        if self.pause.state is EnginePauseState.UNKNOWN:
            # The engine may run or not; only a pause call that returns shows it.
            self.pause.pause_again()
            return []
        if self.pause.state is EnginePauseState.PAUSING:
            return []  # the core asks its peer ranks to pause, too
        effects: list[c.SessionEffect] = []
        if self.update.state in MIXED:  # an ARMED one may belong to a later pause
            effects += self.update.abort(0, m.Abort(self.update.update_id, "lease expired"))
            if len(self._queue):
                self.lease.record_attempt(now_ms - LEASE_RETRY_MS)  # continues after the abort
                return effects
        if self.update.partial:
            if self._awaits_weights:  # without a lease, no trainer brings them
                self._abandoned = True
                if self.update.state is EngineUpdateState.NONE:
                    self.update.abandon_discarded_weights()
            return [*effects, *self._stay()]
        if not self.lease.has_peers:
            self.pause.begin_resume(0)
        elif self.admission.is_stale and not self.admission.closed:
            self._queue.add(c.CallAbortRequests(), 0)  # the core resumes, and opens no admission
        return effects

    def _stay(self) -> list[c.SessionEffect]:
        self.lease.stay_paused()
        fields = {"update_id": self.pause.update_id, "phase": self.phase}
        return [Note("lease_settled", "error", fields)]

    def _with_calls(
        self, effects: Iterable[c.SessionEffect], now_ms: float
    ) -> list[c.SessionEffect]:
        """Returns the effects, followed by the engine call that is to run now."""
        calls = self._queue.issue(now_ms)
        for call in calls:
            self.update.on_issued(call)
        return [*effects, *calls]
