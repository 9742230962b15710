"""One engine's memory in a pause, sidecar's side.

::

    state          event             next           engine call, ack
    AWAKE          SLEEP             FALLING        sleep(level)
    WEIGHTS_AWAKE  SLEEP, in another pause than the last
                                     FALLING        sleep(level): that pause was left behind
    ASLEEP         SLEEP             ASLEEP         ack sleep; of another pause, at any level
    FALLING        sleep returned    ASLEEP         ack sleep
    FALLING        sleep failed      ASLEEP         nack sleep: nobody knows what sleeps now
    ASLEEP         WAKE              WAKING         wake_weights()
    WAKING         wake returned     WEIGHTS_AWAKE  ack wake
    WAKING         wake failed       ASLEEP         nack wake
    AWAKE, WEIGHTS_AWAKE
                   WAKE              (same)         ack wake
    all but AWAKE  resume called     (same)         wake() in place of resume()
    all but AWAKE  resume returned   AWAKE
    all but AWAKE  resume failed     ASLEEP

Invariants: an engine sleeps only in a pause that dropped its KV cache, with no update
under way; nothing is armed while the weights sleep; whatever of it sleeps, one wake ends
both the sleep and the pause, and no resume is called beside it. From the call of a sleep
of level 2 the old weights are gone: until a whole update is committed there is no resume
(:mod:`bus.protocol.engine.session`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from bus.messages import NackCode, Step
from bus.protocol.core.failures import Declined, Failure, wrong_state
from bus.protocol.engine.calls import (
    CALL_STEPS,
    CallQueue,
    CallSleep,
    CallWakeWeights,
    Job,
    SessionEffect,
    ack,
    nack,
)

if TYPE_CHECKING:
    from bus.messages import Sleep, Wake


class MemoryState(StrEnum):
    AWAKE = "awake"
    FALLING = "falling"
    ASLEEP = "asleep"
    WAKING = "waking"
    WEIGHTS_AWAKE = "weights_awake"


_S = MemoryState


class EngineMemory:
    """See the module. Calls go into ``queue``; that the engine is paused, by the pause that
    is named, and no update is under way, the session has checked."""

    def __init__(self, queue: CallQueue) -> None:
        self.state = _S.AWAKE
        self._level = 0
        self._queue = queue
        self._pause_id = ""

    @property
    def awake(self) -> bool:
        """Whether all its memory is there."""
        return self.state is _S.AWAKE

    @property
    def has_discarded_weights(self) -> bool:
        """Whether this sleep is one that has let the weights go."""
        return self._level == 2 and not self.awake  # noqa: PLR2004 - the level

    def sleep(self, msg_id: int, message: Sleep) -> list[SessionEffect]:
        """SLEEP."""
        another = message.update_id != self._pause_id  # else it is late
        if self.state is _S.AWAKE or (self.state is _S.WEIGHTS_AWAKE and another):
            self.state = _S.FALLING
            self._level = message.level
            self._pause_id = message.update_id
            self._queue.add(CallSleep(message.level), msg_id)
            return []
        if message.level != self._level and not another:
            raise wrong_state(f"the engine sleeps at level {self._level}", "level")
        if self.state is _S.FALLING:
            return []
        if self.state is _S.ASLEEP:
            return [ack(msg_id, Step.SLEEP, message.update_id)]
        raise wrong_state("the engine's weights are about to be awake")

    def wake(self, msg_id: int, message: Wake) -> list[SessionEffect]:
        """WAKE."""
        if self.state in (_S.AWAKE, _S.WEIGHTS_AWAKE):
            return [ack(msg_id, Step.WAKE, message.update_id)]
        if self.state is _S.FALLING:
            raise wrong_state("the engine is falling asleep")
        if self.state is _S.ASLEEP:
            self.state = _S.WAKING
            self._pause_id = message.update_id
            self._queue.add(CallWakeWeights(), msg_id)
        return []

    def need_weights(self) -> None:
        """Something is to be armed.

        Raises:
            Declined: the weights sleep.
        """
        if self.state not in (_S.AWAKE, _S.WEIGHTS_AWAKE):
            raise Declined(
                Failure(
                    NackCode.ENGINE_ASLEEP,
                    f"the engine is {self.state.value}, at level {self._level}",
                    hint="pause, and send WAKE first",
                )
            )

    def on_call_done(self, job: Job, took_ms: float) -> list[SessionEffect]:
        """A sleep or a wake has returned."""
        asleep = isinstance(job.call, CallSleep)
        self.state = _S.ASLEEP if asleep else _S.WEIGHTS_AWAKE
        step = CALL_STEPS[type(job.call)]
        return [ack(job.reply_to, step, self._pause_id, took_ms=took_ms)]

    def on_call_failed(self, job: Job, failure: Failure) -> list[SessionEffect]:
        """One has raised."""
        self.state = _S.ASLEEP
        return [nack(job.reply_to, CALL_STEPS[type(job.call)], failure, self._pause_id)]

    def on_resumed(self) -> None:
        """All of it is back."""
        self.state = _S.AWAKE

    def found_asleep(self) -> None:
        """Some of it is not there; nobody knows what."""
        self.state = _S.ASLEEP

    def on_resume_failed(self) -> None:
        """Of what slept, nobody knows what sleeps now."""
        if not self.awake:
            self.state = _S.ASLEEP
