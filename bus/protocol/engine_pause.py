"""One engine's pause, sidecar's side.

::

    state     event            next      engine call, ack
    RUNNING   PAUSE_LOCAL      PAUSING   pause(mode, clear_cache); ack pause_local when issued
    PAUSING   pause returned   PAUSED    ack pause_global, if it was asked
    PAUSING   pause failed     RUNNING   nack pause_global
    PAUSED    RESUME           RESUMING  resume()
    PAUSING   RESUME           PAUSING   remembered: resume() follows the pause's return
    RESUMING  resume returned  RUNNING   ack resume
    RESUMING  resume failed    PAUSED    nack resume
    RESUMING  PAUSE_LOCAL      RESUMING  remembered: pause() follows the resume's return

Invariants: an engine gets a resume only after its pause has returned, and one resume
per pause; paused is acked by that return and by nothing else; doubled commands are
acked again and call nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from bus.messages import PauseGlobal, PauseLocal, Resume, Step
from bus.protocol.calls import CallPause, CallQueue, CallResume, Job, SessionEffect, ack, nack
from bus.protocol.refusal import wrong_state

if TYPE_CHECKING:
    from bus.protocol.instructions import Failure


class EnginePauseState(StrEnum):
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"


_S = EnginePauseState


class EnginePause:
    """See the module. Calls go into ``queue``."""

    def __init__(self, queue: CallQueue) -> None:
        self.state = _S.RUNNING
        self.update_id = ""
        self.lease_ms = 0.0
        self.in_flight = 0
        self._queue = queue
        self._last_resume = ""
        self._global_asked = 0  # id of the PAUSE_GLOBAL that waits for the pause's return
        self._resume_asked: int | None = None  # id of the RESUME that waits for it
        self._next: tuple[int, PauseLocal] | None = None  # waits for the resume's return

    def local(self, msg_id: int, message: PauseLocal) -> list[SessionEffect]:
        """PAUSE_LOCAL."""
        if self.state is _S.RESUMING:
            self._next = (msg_id, message)
            return []
        self.lease_ms = float(message.lease_ms)
        if self.state is _S.RUNNING:
            self.state = _S.PAUSING
            self._queue.add(CallPause(message.mode, message.clear_cache), msg_id)
        if message.update_id != self.update_id:
            # A new pause; or one that was left behind, half made, is taken over by this one.
            self.update_id = message.update_id
            self._global_asked = 0
            self._resume_asked = None
        return [ack(msg_id, Step.PAUSE_LOCAL, self.update_id, in_flight=self.in_flight)]

    def globally(self, msg_id: int, message: PauseGlobal) -> list[SessionEffect]:
        """PAUSE_GLOBAL."""
        if self.state is _S.RUNNING or message.update_id != self.update_id:
            raise wrong_state(
                f"the engine is {self.state.value} (pause {self.update_id or 'none'})", "update_id"
            )
        if self.state is _S.PAUSING:
            self._global_asked = msg_id
            return []
        if self.state is _S.RESUMING:
            raise wrong_state("the engine is resuming")
        return [self._paused_ack(msg_id, 0.0)]

    def resume(self, msg_id: int, message: Resume) -> list[SessionEffect]:
        """RESUME; the session has checked that the weights are whole."""
        if self.state is _S.RUNNING:
            if message.update_id and message.update_id == self._last_resume:
                return [ack(msg_id, Step.RESUME, message.update_id, in_flight=self.in_flight)]
            raise wrong_state("the engine is not paused", "update_id")
        if message.update_id != self.update_id:
            raise wrong_state(f"the engine is in pause {self.update_id}", "update_id")
        if self.state is _S.PAUSING:
            self._resume_asked = msg_id
        elif self.state is _S.PAUSED:
            self.begin_resume(msg_id)
        return []

    def begin_resume(self, msg_id: int) -> None:
        """The pause is complete: resume."""
        self.state = _S.RESUMING
        self._queue.add(CallResume(), msg_id)

    def pause_returned(self, took_ms: float) -> list[SessionEffect]:
        """The engine is idle on its device."""
        self.state = _S.PAUSED
        effects: list[SessionEffect] = []
        if self._global_asked:
            effects.append(self._paused_ack(self._global_asked, took_ms))
            self._global_asked = 0
        if self._resume_asked is not None:
            msg_id, self._resume_asked = self._resume_asked, None
            self.begin_resume(msg_id)
        return effects

    def pause_failed(self, job: Job, failure: Failure) -> list[SessionEffect]:
        """The engine could not be paused, and runs."""
        self.state = _S.RUNNING
        reply_to = self._global_asked or job.reply_to
        self._global_asked = 0
        self._resume_asked = None
        return [nack(reply_to, Step.PAUSE_GLOBAL, failure, self.update_id)]

    def resume_returned(self, job: Job, took_ms: float) -> list[SessionEffect]:
        """The engine schedules again; a pause that came meanwhile follows."""
        self.state = _S.RUNNING
        self._last_resume = self.update_id
        effects: list[SessionEffect] = [
            ack(
                job.reply_to,
                Step.RESUME,
                self.update_id,
                in_flight=self.in_flight,
                took_ms=took_ms,
            )
        ]
        return effects + self._follow()

    def resume_failed(self, job: Job, failure: Failure) -> list[SessionEffect]:
        """The engine is still paused."""
        self.state = _S.PAUSED
        effects: list[SessionEffect] = [nack(job.reply_to, Step.RESUME, failure, self.update_id)]
        return effects + self._follow()

    def _follow(self) -> list[SessionEffect]:
        if self._next is None:
            return []
        (msg_id, message), self._next = self._next, None
        return self.local(msg_id, message)

    def _paused_ack(self, msg_id: int, took_ms: float) -> SessionEffect:
        return ack(
            msg_id, Step.PAUSE_GLOBAL, self.update_id, in_flight=self.in_flight, took_ms=took_ms
        )
