"""Puts one engine's memory to sleep in a pause, and wakes it: the sidecar's side.

Invariants:

- An engine sleeps only in a pause that dropped its KV cache, and while no update is under way.
- Nothing is armed while the weights sleep.
- One wake call wakes all memory that sleeps and ends the pause; no resume is called in addition.
- A sleep of level 2 discards the weights as soon as it is called. No resume follows until a whole
  update is committed (:mod:`bus._protocol.engine.session`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bus._protocol.core.failures import Failure, decline, wrong_state
from bus._protocol.core.state_table import StateMachine
from bus._protocol.engine import calls as c
from bus.messages import NackCode, Step

if TYPE_CHECKING:
    from bus.messages import Sleep, Wake


class MemoryState(StrEnum):
    """How much of the engine's memory sleeps."""

    AWAKE = "awake"
    FALLING = "falling"
    ASLEEP = "asleep"
    WAKING = "waking"
    WEIGHTS_AWAKE = "weights_awake"


class MemoryEvent(StrEnum):
    SLEEP_ASKED = "sleep_asked"
    SLEEP_RETURNED = "sleep_returned"
    WAKE_ASKED = "wake_asked"
    WAKE_RETURNED = "wake_returned"
    CALL_FAILED = "call_failed"
    RESUMED = "resumed"
    RESUME_FAILED = "resume_failed"
    FOUND_ASLEEP = "found_asleep"


_S, _E = MemoryState, MemoryEvent

# Beside each row: the engine call, or the answer. A repeated command is acked again.
TRANSITIONS: Final[dict[tuple[MemoryState, MemoryEvent], MemoryState]] = {
    (_S.AWAKE, _E.SLEEP_ASKED): _S.FALLING,  # sleep(level)
    (_S.WEIGHTS_AWAKE, _E.SLEEP_ASKED): _S.FALLING,  # the same, in another pause than the last
    (_S.FALLING, _E.SLEEP_RETURNED): _S.ASLEEP,  # ack sleep
    (_S.FALLING, _E.CALL_FAILED): _S.ASLEEP,  # nack sleep: what sleeps now is unknown
    (_S.ASLEEP, _E.WAKE_ASKED): _S.WAKING,  # wake_weights()
    (_S.WAKING, _E.WAKE_RETURNED): _S.WEIGHTS_AWAKE,  # ack wake
    (_S.WAKING, _E.CALL_FAILED): _S.ASLEEP,  # nack wake
    # The pause's resume; of an engine that is not AWAKE it was wake().
    **{(each, _E.RESUMED): _S.AWAKE for each in (_S.AWAKE, _S.ASLEEP, _S.WEIGHTS_AWAKE)},
    (_S.AWAKE, _E.RESUME_FAILED): _S.AWAKE,
    (_S.ASLEEP, _E.RESUME_FAILED): _S.ASLEEP,
    (_S.WEIGHTS_AWAKE, _E.RESUME_FAILED): _S.ASLEEP,  # what sleeps now is unknown
    # A sidecar finds the engine paused; what of its memory sleeps is unknown.
    **{(each, _E.FOUND_ASLEEP): _S.ASLEEP for each in (_S.AWAKE, _S.ASLEEP, _S.WEIGHTS_AWAKE)},
}


class EngineMemory(StateMachine[MemoryState, MemoryEvent]):
    """Puts one engine to sleep and wakes it; adds the engine calls to ``queue``.

    The caller must have checked that the engine is in the pause that the command names, and has no
    update under way.
    """

    def __init__(self, queue: c.CallQueue) -> None:
        super().__init__("engine memory", TRANSITIONS, _S.AWAKE)
        self._level = 0
        self._queue = queue
        self._pause_id = ""

    @property
    def awake(self) -> bool:
        """Whether none of the engine's memory sleeps."""
        return self.state is _S.AWAKE

    @property
    def has_discarded_weights(self) -> bool:
        """Whether the present sleep has discarded the weights."""
        return self._level == 2 and not self.awake  # noqa: PLR2004 - the level

    def sleep(self, msg_id: int, message: Sleep, *, clears: bool) -> list[c.SessionEffect]:
        """Executes a SLEEP command, whose message id is ``msg_id``.

        Args:
            msg_id: the message's id.
            message: the command.
            clears: whether the pause has kept KV caches, which the sleep call then drops.

        Raises:
            Declined: the engine sleeps at another level, or is waking.
        """
        another = message.update_id != self._pause_id  # else a late duplicate
        if self.state is _S.AWAKE or (self.state is _S.WEIGHTS_AWAKE and another):
            self._go(_E.SLEEP_ASKED)
            self._level = message.level
            self._pause_id = message.update_id
            self._queue.add(c.CallSleep(message.level, clears), msg_id)
            return []
        if message.level != self._level and not another:
            raise wrong_state(f"the engine already sleeps at level {self._level}", "level")
        if self.state is _S.FALLING:
            return []
        if self.state is _S.ASLEEP:
            return [c.ack(msg_id, Step.SLEEP, message.update_id)]
        raise wrong_state("the engine's weights are being woken")

    def wake(self, msg_id: int, message: Wake) -> list[c.SessionEffect]:
        """Executes a WAKE command, whose message id is ``msg_id``.

        Raises:
            Declined: the sleep call has not returned.
        """
        if self.state in (_S.AWAKE, _S.WEIGHTS_AWAKE):
            return [c.ack(msg_id, Step.WAKE, message.update_id)]
        if self.state is _S.FALLING:
            raise wrong_state("the engine is going to sleep")
        if self.state is _S.ASLEEP:
            self._go(_E.WAKE_ASKED)
            self._pause_id = message.update_id
            self._queue.add(c.CallWakeWeights(), msg_id)
        return []

    def need_weights(self) -> None:
        """Checks that the weights are awake, so that an update can be armed.

        Raises:
            Declined: the engine sleeps.
        """
        if self.state not in (_S.AWAKE, _S.WEIGHTS_AWAKE):
            raise decline(
                NackCode.ENGINE_ASLEEP,
                f"the engine is {self.state.value}, at sleep level {self._level}",
                hint="pause, and send WAKE first",
            )

    def on_call_done(self, job: c.Job, took_ms: float) -> list[c.SessionEffect]:
        """Handles the return of a sleep or wake call."""
        asleep = isinstance(job.call, c.CallSleep)
        self._go(_E.SLEEP_RETURNED if asleep else _E.WAKE_RETURNED)
        step = c.CALL_STEPS[type(job.call)]
        return [c.ack(job.reply_to, step, self._pause_id, took_ms=took_ms)]

    def on_call_failed(self, job: c.Job, failure: Failure) -> list[c.SessionEffect]:
        """Handles the failure of a sleep or wake call."""
        self._go(_E.CALL_FAILED)
        return [c.nack(job.reply_to, c.CALL_STEPS[type(job.call)], failure, self._pause_id)]

    def on_resumed(self) -> None:
        """Records a resume, after which all memory is awake."""
        self._go(_E.RESUMED)

    def found_asleep(self) -> None:
        """Records that the engine was found asleep; which memory sleeps is unknown."""
        self._go(_E.FOUND_ASLEEP)

    def on_resume_failed(self) -> None:
        """Records a failed resume, after which it is unknown which memory sleeps."""
        self._go(_E.RESUME_FAILED)
