"""Pauses and resumes one engine: the sidecar's side.

Invariants:

- An engine gets a resume only after its pause has returned, and one resume per pause.
- The step pause_global is acknowledged only after that return. PAUSE_GLOBAL asks for this ack, and
  so does PAUSE_LOCAL with ``one_phase``, which gets no other ack.
- A paused engine has dropped everything that its present pause asks to drop, even if an earlier
  pause of another trainer kept it.
- A repeated command is acknowledged again and calls nothing.
- A pause call that failed may have paused the engine. Only another pause call that returns shows
  the engine's state; until then there is no resume.
- The resume wakes all memory that sleeps (:mod:`bus._protocol.engine.memory`), and opens admission
  that a quarantine closed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bus._protocol.core.ack_barrier import ESCALATED, STILL_CLOSED
from bus._protocol.core.failures import wrong_state
from bus._protocol.core.state_table import StateMachine
from bus._protocol.engine import calls as c
from bus.messages import Escalation, PauseGlobal, PauseLocal, PauseMode, Resume, Step

if TYPE_CHECKING:
    from bus._protocol.core.failures import Failure
    from bus._protocol.engine.admission import Admission
    from bus._protocol.engine.lease import EngineLease
    from bus._protocol.engine.memory import EngineMemory


# The outcome of a `wait` pause whose requests ended in time.
DRAINED: Final = "drained"


class EnginePauseState(StrEnum):
    """Progress of an engine's pause."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    UNKNOWN = "pause_unknown"


class EnginePauseEvent(StrEnum):
    PAUSE_ASKED = "pause_asked"
    STRENGTHEN_ASKED = "strengthen_asked"
    PAUSE_RETURNED = "pause_returned"
    PAUSE_FAILED = "pause_failed"
    PROBE_FAILED = "probe_failed"
    RESUME_ASKED = "resume_asked"
    RESUME_RETURNED = "resume_returned"
    RESUME_FAILED = "resume_failed"
    FOUND_PAUSED = "found_paused"
    FOUND_RUNNING = "found_running"


_S, _E = EnginePauseState, EnginePauseEvent

# Beside each row: the engine call, or the answer. A command that has to wait is queued:
# RESUME in PAUSING; PAUSE_LOCAL in RESUMING. So is what a PAUSE_LOCAL in PAUSING wants dropped
# beyond the pause under way. When the time of a `wait` is over, pause(escalate) is called beside
# it.
# A PAUSE_LOCAL with `one_phase` is PAUSE_LOCAL without its ack, followed by PAUSE_GLOBAL.
TRANSITIONS: Final[dict[tuple[EnginePauseState, EnginePauseEvent], EnginePauseState]] = {
    # pause(mode, clear_cache); ack pause_local when it is issued.
    (_S.RUNNING, _E.PAUSE_ASKED): _S.PAUSING,
    (_S.UNKNOWN, _E.PAUSE_ASKED): _S.PAUSING,
    # strengthen(aborts, clears): another PAUSE_LOCAL wants more dropped; ack pause_local at once
    (_S.PAUSED, _E.STRENGTHEN_ASKED): _S.PAUSING,
    # ack pause_global, if it was asked; of two calls the later return counts
    (_S.PAUSING, _E.PAUSE_RETURNED): _S.PAUSED,
    (_S.PAUSING, _E.PAUSE_FAILED): _S.UNKNOWN,  # nack pause_global; of two calls, if both failed
    (_S.PAUSED, _E.PROBE_FAILED): _S.UNKNOWN,  # (the update's nack)
    (_S.PAUSING, _E.PROBE_FAILED): _S.UNKNOWN,  # pause() in place of strengthen() follows
    (_S.PAUSED, _E.RESUME_ASKED): _S.RESUMING,  # resume(), or wake()
    (_S.RESUMING, _E.RESUME_RETURNED): _S.RUNNING,  # ack resume
    (_S.RESUMING, _E.RESUME_FAILED): _S.PAUSED,  # nack resume
    # A sidecar finds what an earlier one, or the engine itself, has done.
    **{(each, _E.FOUND_PAUSED): _S.PAUSED for each in (_S.RUNNING, _S.PAUSED, _S.UNKNOWN)},
    **{(each, _E.FOUND_RUNNING): _S.RUNNING for each in (_S.PAUSED, _S.UNKNOWN)},
}


class EnginePause(StateMachine[EnginePauseState, EnginePauseEvent]):
    """Pauses and resumes one engine; adds the engine calls to ``queue``."""

    def __init__(
        self, queue: c.CallQueue, memory: EngineMemory, lease: EngineLease, admission: Admission
    ) -> None:
        super().__init__("engine pause", TRANSITIONS, _S.RUNNING)
        self.update_id = ""
        self.in_flight = 0
        self._in_flight_before = 0  # when the present pause was asked: it may end requests
        self._queue = queue
        self._memory = memory
        self._lease = lease
        self._admission = admission
        self._last_resume = ""
        self._call = c.CallPause("keep", clear_cache=False)  # the last pause call
        self._escalation: Escalation = "keep"
        self.escalate_ms: float | None = None  # when a `wait` pause changes to it
        self.pending = 0  # pause calls that have not returned: two after an escalation
        self._returned = False  # one of them has returned
        self._lacks: c.CallStrengthenPause | None = None  # what the next pause must drop, too
        self._outcome = ""
        self._waited_for: tuple[str, ...] = ()
        self._global_asked = 0  # id of the message to answer with pause_global at the return
        self._resume_asked: int | None = None  # id of the RESUME that waits for that return
        self._next: tuple[int, PauseLocal] | None = None  # waits for the resume's return

    def local(self, msg_id: int, message: PauseLocal, now_ms: float) -> list[c.SessionEffect]:
        """Executes PAUSE_LOCAL: pauses the engine, or strengthens its present pause."""
        if self.state is _S.RESUMING:
            self._next = (msg_id, message)
            return []
        if not self._lease.is_decided_by_cores or message.update_id != self.update_id:
            self._lease.begin(float(message.lease_ms), now_ms)
        begins = self.state in (_S.RUNNING, _S.UNKNOWN)
        if begins or message.update_id != self.update_id:
            # A new pause; or this pause takes over a half-made one that was left behind.
            self.update_id = message.update_id
            self._global_asked, self._resume_asked = 0, None
            self._in_flight_before = self.in_flight
        if begins:
            self._begin(msg_id, c.CallPause(message.mode, message.clear_cache))
            if message.mode == "wait":
                self._outcome, self._escalation = DRAINED, message.escalate
                self.escalate_ms = now_ms + message.wait_ms if message.wait_ms else None
        else:
            self._strengthen(msg_id, message)
        if message.one_phase:
            return self.globally(msg_id, PauseGlobal(self.update_id))
        return [c.ack(msg_id, Step.PAUSE_LOCAL, self.update_id, in_flight=self.in_flight)]

    def _strengthen(self, msg_id: int, message: PauseLocal) -> None:
        """Drops requests or caches that another owner's pause keeps and ``message`` does not."""
        made = self.effective_call
        aborts = message.mode == "abort" and made.mode != "abort"
        clears = message.clear_cache and not made.clear_cache
        if not (aborts or clears):
            return
        self._call = c.CallPause("abort" if aborts else made.mode, made.clear_cache or clears)
        self._outcome = ""
        if self._lacks is not None:  # an earlier strengthening is not done yet
            aborts, clears = aborts or self._lacks.aborts, clears or self._lacks.clears
        self._lacks = c.CallStrengthenPause(aborts, clears)
        if self.state is _S.PAUSED:
            self._go(_E.STRENGTHEN_ASKED)
            self._add_what_lacks(msg_id)

    def _add_what_lacks(self, reply_to: int) -> None:
        lacks, self._lacks = self._lacks, None
        assert lacks is not None
        self._queue.add(lacks, reply_to)

    def _begin(self, msg_id: int, call: c.CallPause) -> None:
        self._go(_E.PAUSE_ASKED)
        self._call = call
        self.pending = 1
        self._returned = False
        self._lacks = None
        self._waited_for = ()
        self._outcome = ""
        self.escalate_ms = None
        self._queue.add(call, msg_id)

    def pause_again(self) -> None:
        """Repeats a failed pause call, which may have paused the engine; waits for no requests."""
        made = self.effective_call
        mode: PauseMode = "abort" if made.mode == "abort" else "keep"
        self._begin(0, c.CallPause(mode, made.clear_cache))

    @property
    def effective_call(self) -> c.CallPause:
        """The pause call that is in effect; after an escalation, the escalated call."""
        if self._outcome == ESCALATED:
            return c.CallPause(self._escalation, self._call.clear_cache)
        return self._call

    def on_probe_failed(self) -> None:
        """Handles failed probes: the engine may not have been paused again after them."""
        self._go(_E.PROBE_FAILED)
        if self._queue.drop_strengthening():  # a new pause call drops as much
            self.pause_again()

    @property
    def clears_cache(self) -> bool:
        """Whether the pause drops KV caches."""
        return self._call.clear_cache

    def escalate(self) -> list[c.SessionEffect]:
        """Pauses again after a `wait` pause's deadline, in the mode that the caller chose."""
        self.escalate_ms = None
        self.pending += 1
        return [c.CallEscalate(self._escalation, self._call.clear_cache)]

    def on_escalated(self, waited_for: tuple[str, ...]) -> None:
        """Records that the escalation is about to be called, and which requests still run."""
        self._outcome = ESCALATED
        self._waited_for = waited_for

    def globally(self, msg_id: int, message: PauseGlobal) -> list[c.SessionEffect]:
        """Executes a PAUSE_GLOBAL command."""
        if self.state in (_S.RUNNING, _S.UNKNOWN) or message.update_id != self.update_id:
            raise wrong_state(
                f"the engine is {self.state.value} (pause {self.update_id or 'none'})", "update_id"
            )
        if self.state is _S.PAUSING:
            self._global_asked = msg_id
            return []
        if self.state is _S.RESUMING:
            raise wrong_state("the engine is resuming")
        return [self._paused_ack(msg_id, 0.0)]

    def resume(self, msg_id: int, message: Resume) -> list[c.SessionEffect]:
        """Executes a RESUME. The caller has checked that the weights are whole."""
        if self.state is _S.RUNNING:
            if message.update_id and message.update_id == self._last_resume:
                return [self._resumed_ack(msg_id, 0.0)]
            raise wrong_state("the engine is not paused", "update_id")
        if message.update_id != self.update_id:
            raise wrong_state(f"the engine is in pause {self.update_id}", "update_id")
        if self.state is _S.UNKNOWN:
            raise wrong_state("it is unknown whether the engine is paused", hint="pause it again")
        if self.state is _S.PAUSING:
            self._resume_asked = msg_id
        elif self.state is _S.PAUSED:
            self.begin_resume(msg_id)
        return []

    def begin_resume(self, msg_id: int) -> None:
        """Resumes the engine, whose pause is complete."""
        self._go(_E.RESUME_ASKED)
        admission = self._admission
        if admission.is_stale and not admission.closed:
            self._queue.add(c.CallAbortRequests(), 0)
        opens = admission.closed and not admission.is_stale
        self._queue.add(c.CallResume(asleep=not self._memory.awake, opens=opens), msg_id)

    def on_paused(self, took_ms: float) -> list[c.SessionEffect]:
        """Handles the return of a pause call; the pause is complete once none is pending."""
        self.pending -= 1
        self._returned = True
        self.escalate_ms = None
        return [] if self.pending else self.on_strengthened(took_ms)

    def on_strengthened(self, took_ms: float) -> list[c.SessionEffect]:
        """Handles a strengthening's return; acknowledges the pause once all is dropped."""
        if self._lacks is not None:
            self._add_what_lacks(self._global_asked)
            return []
        self._go(_E.PAUSE_RETURNED)
        effects: list[c.SessionEffect] = []
        if self._global_asked:
            effects.append(self._paused_ack(self._global_asked, took_ms))
            self._global_asked = 0
        if self._resume_asked is not None:
            msg_id, self._resume_asked = self._resume_asked, None
            self.begin_resume(msg_id)
        return effects

    def on_strengthen_failed(self, reply_to: int, failure: Failure) -> list[c.SessionEffect]:
        """Handles a failed strengthening: requests or caches may not have been dropped."""
        self.pending, self._returned = 1, False
        return self.on_pause_failed(reply_to, failure)

    def on_pause_failed(self, reply_to: int, failure: Failure) -> list[c.SessionEffect]:
        """Handles a failed pause call; if a second one is pending, its result decides."""
        self.pending -= 1
        self.escalate_ms = None
        if self.pending:
            return []
        if self._returned:
            self.pending += 1
            return self.on_paused(0.0)
        self._go(_E.PAUSE_FAILED)
        reply_to = self._global_asked or reply_to
        self._global_asked = 0
        self._resume_asked = None
        return [c.nack(reply_to, Step.PAUSE_GLOBAL, failure, self.update_id)]

    def on_resumed(self, job: c.Job, took_ms: float, now_ms: float) -> list[c.SessionEffect]:
        """Handles the return of a resume, and begins a pause that came meanwhile."""
        self._go(_E.RESUME_RETURNED)
        self._lease.end()
        if isinstance(job.call, c.CallResume) and job.call.opens:
            self._admission.closed = self._admission.unconfirmed = False
        self._memory.on_resumed()
        self._last_resume = self.update_id
        return [self._resumed_ack(job.reply_to, took_ms), *self.run_queued(now_ms)]

    def _resumed_ack(self, reply_to: int, took_ms: float) -> c.SessionEffect:
        outcome, held = STILL_CLOSED if self._admission.closed else "", self.in_flight
        update_id = self._last_resume
        return c.ack(
            reply_to, Step.RESUME, update_id, in_flight=held, took_ms=took_ms, outcome=outcome
        )

    def on_resume_failed(
        self, job: c.Job, failure: Failure, now_ms: float
    ) -> list[c.SessionEffect]:
        """Handles the failure of a resume: the engine is still paused."""
        self._go(_E.RESUME_FAILED)
        self._memory.on_resume_failed()
        failed = c.nack(job.reply_to, Step.RESUME, failure, self.update_id)
        return [failed, *self.run_queued(now_ms)]

    def on_found_paused(self, update_id: str, lease_ms: float, now_ms: float) -> None:
        """Records the pause of an earlier sidecar, which may have kept requests or caches."""
        self._go(_E.FOUND_PAUSED)
        self._call, self._outcome = c.CallPause("keep", clear_cache=False), ""
        self.update_id = update_id
        self._next = None  # its command is repeated
        self._lease.begin(lease_ms, now_ms)

    def found_running(self) -> None:
        """Records that the engine has ended the pause by itself."""
        self._go(_E.FOUND_RUNNING)
        self._last_resume = self.update_id
        self._next = None  # its command is repeated
        self._lease.end()
        self._memory.on_resumed()

    def run_queued(self, now_ms: float) -> list[c.SessionEffect]:
        """Begins the pause that was requested during the resume, if there is one."""
        if self._next is None:
            return []
        (msg_id, message), self._next = self._next, None
        return self.local(msg_id, message, now_ms)

    def _paused_ack(self, msg_id: int, took_ms: float) -> c.SessionEffect:
        return c.ack(
            msg_id,
            Step.PAUSE_GLOBAL,
            self.update_id,
            in_flight=max(self.in_flight, self._in_flight_before),
            took_ms=took_ms,
            outcome=self._outcome,
            waited_for=self._waited_for,
        )
