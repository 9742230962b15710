"""Tracks the pause that a trainer holds, from the broker's answers.

Invariant: in a pause, a step is requested only under the epoch in which the pause was made. If the
epoch differs, the broker has declared this trainer lost and has resumed its engines.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bus._protocol.core.failures import Failure
from bus._protocol.core.state_table import StateMachine
from bus.errors import Refused, UpdateFailed
from bus.messages import NackCode, PauseLocal, Resume, Sleep, Wake

if TYPE_CHECKING:
    from bus.messages import Message


class PauseWindowState(StrEnum):
    """Whether the trainer holds a pause."""

    NONE = "none"
    HELD = "held"
    ASLEEP = "asleep"


class PauseWindowEvent(StrEnum):
    PAUSED = "paused"
    SLEEP_ASKED = "sleep_asked"
    AWAKE = "awake"
    ENDED = "ended"
    LOST = "lost"


_S, _E = PauseWindowState, PauseWindowEvent

TRANSITIONS: Final[dict[tuple[PauseWindowState, PauseWindowEvent], PauseWindowState]] = {
    # The broker answers PAUSE_LOCAL; a later pause of this trainer takes the first one over.
    **{(state, _E.PAUSED): _S.HELD for state in PauseWindowState},
    (_S.HELD, _E.SLEEP_ASKED): _S.ASLEEP,  # SLEEP is requested: weights may be gone from now on
    (_S.HELD, _E.AWAKE): _S.HELD,  # the broker answers WAKE, after a sleep of an earlier trainer
    (_S.ASLEEP, _E.AWAKE): _S.HELD,  # the broker answers WAKE
    # RESUME is over: answered, refused, or left to guaranteed delivery.
    **{(state, _E.ENDED): _S.NONE for state in (_S.HELD, _S.ASLEEP)},
    # The trainer's epoch has changed; or no engine is left in the pause.
    **{(state, _E.LOST): _S.NONE for state in (_S.HELD, _S.ASLEEP)},
}


class PauseWindow(StateMachine[PauseWindowState, PauseWindowEvent]):
    """Tracks the pause that one trainer holds.

    Attributes:
        pause: the PAUSE_LOCAL of the pause that is held; None: none is held.
        epoch: the epoch in which that pause was made.
    """

    def __init__(self) -> None:
        super().__init__("pause window", TRANSITIONS, _S.NONE)
        self.pause: PauseLocal | None = None
        self.epoch = 0
        self._over_id = ""  # the id of the pause that was resumed last

    @property
    def is_open(self) -> bool:
        """Whether the trainer holds its group paused."""
        return self.state is not _S.NONE

    def require_epoch(self, epoch: int, update_id: str) -> None:
        """Checks, before a step is requested, that the pause was made in this epoch.

        Args:
            epoch: the trainer's present fencing epoch.
            update_id: the update that the step belongs to; the error names it.

        Raises:
            UpdateFailed: with code ``fenced``, if the pause was made in another epoch.
        """
        if self.is_open and epoch != self.epoch:
            self._end(_E.LOST)
            detail = "the broker counted this trainer as dead, and resumed its engines"
            hint = "keep the event loop free, or use SyncTrainerAgent"
            failure = Failure(NackCode.FENCED, detail, field="epoch", hint=hint)
            raise UpdateFailed(failure.nack("update", update_id))

    def on_asked(self, message: Message, epoch: int) -> None:
        """Records that a step is about to be requested; chunks need :meth:`require_epoch` alone.

        Raises:
            UpdateFailed: as :meth:`require_epoch`.
        """
        self.require_epoch(epoch, getattr(message, "update_id", ""))
        if isinstance(message, Sleep) and self.is_open:  # else the broker refuses it
            self._go(_E.SLEEP_ASKED)

    def on_acked(self, message: Message, epoch: int) -> None:
        """Records that the broker has acknowledged a step.

        Args:
            message: the step's message.
            epoch: the trainer's present fencing epoch.
        """
        if isinstance(message, PauseLocal):
            if message.update_id == self._over_id:
                return  # a repeated answer, after that of RESUME
            self._go(_E.PAUSED)
            self.pause, self.epoch = message, epoch
        elif isinstance(message, Wake) and self.is_open:
            self._go(_E.AWAKE)

    def on_over(self, message: Message) -> None:
        """Records that no answer to a step is awaited any more. Only RESUME changes the state."""
        if isinstance(message, Resume):
            self._over_id = message.update_id
            if self.is_open:
                self._end(_E.ENDED)

    def on_no_engines(self, update_id: str) -> None:
        """Records that the broker has ended a pause because no engine is left in it."""
        if self.pause is not None and self.pause.update_id == update_id:
            self._end(_E.LOST)

    @staticmethod
    def undo(update_id: str, error: BaseException) -> list[Resume]:
        """Returns the messages to send after a PAUSE_LOCAL or RESUME that failed.

        If the broker has refused the step, the broker resumes the engines, so nothing is sent. If
        no answer has arrived, the group may be paused, so RESUME is sent.

        Args:
            update_id: the pause's id.
            error: the error with which the step ended, such as ``Refused`` or ``BusTimeout``.
        """
        return [] if isinstance(error, Refused) else [Resume(update_id)]

    def _end(self, event: PauseWindowEvent) -> None:
        self._go(event)
        self.pause = None
