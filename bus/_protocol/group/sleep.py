"""Puts a paused group of engines to sleep, and wakes the group: the broker's side.

Invariants:

- Engines are asked only in a completed pause, and while no update is under way.
- A sleep is local to each engine, unlike a pause, so an engine that refuses does not delay the
  others. The trainer gets the first reason, and a RESUME wakes all engines that sleep.
- An engine counts as ``discarded`` from the moment a sleep of level 2 is requested until a commit.
  Without a commit it stays asleep, quarantined.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bus._protocol.core.instructions import Instruction, StepDone, StepFailed
from bus._protocol.core.step_machine import StepMachine
from bus.messages import Sleep, Step, Wake

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.core.failures import Failure
    from bus.messages import Ack


class SleepState(StrEnum):
    """How much of a group's memory sleeps."""

    AWAKE = "awake"
    FALLING = "falling"
    ASLEEP = "asleep"
    WAKING = "waking"
    WEIGHTS_AWAKE = "weights_awake"


class SleepEvent(StrEnum):
    SLEEP_ASKED = "sleep_asked"
    ALL_ASLEEP = "all_asleep"
    WAKE_ASKED = "wake_asked"
    ALL_AWAKE = "all_awake"
    SOME_FAILED = "some_failed"
    OVER = "over"


_S, _E = SleepState, SleepEvent

TRANSITIONS: Final[dict[tuple[SleepState, SleepEvent], SleepState]] = {
    (_S.AWAKE, _E.SLEEP_ASKED): _S.FALLING,  # SLEEP to every rank, at once
    (_S.FALLING, _E.ALL_ASLEEP): _S.ASLEEP,  # the trainer gets: asleep; or the first refusal
    (_S.AWAKE, _E.WAKE_ASKED): _S.WAKING,  # WAKE to every rank, at once
    (_S.ASLEEP, _E.WAKE_ASKED): _S.WAKING,
    (_S.WEIGHTS_AWAKE, _E.WAKE_ASKED): _S.WAKING,
    (_S.WAKING, _E.ALL_AWAKE): _S.WEIGHTS_AWAKE,  # the trainer gets: the weights are awake
    (_S.WAKING, _E.SOME_FAILED): _S.ASLEEP,  # the trainer gets the refusal; it may ask again
    # The pause has ended, and its RESUME has woken all.
    **{(state, _E.OVER): _S.AWAKE for state in _S if state is not _S.AWAKE},
}


class SleepMachine(StepMachine[SleepState, SleepEvent]):
    """Tracks the sleep of one group. Methods take an event or command, and return instructions.

    Attributes:
        discarded: the engines whose weights a sleep has discarded, until a commit.
    """

    def __init__(self) -> None:
        super().__init__("sleep", TRANSITIONS, _S.AWAKE)
        self.discarded: set[str] = set()
        self._failure: Failure | None = None

    def sleep(self, message: Sleep, members: dict[str, str], now_ms: float) -> list[Instruction]:
        """Sends SLEEP to every engine in ``members`` (name to DP group)."""
        self._go(_E.SLEEP_ASKED)
        if message.level == 2:  # noqa: PLR2004 - the level
            self.discarded.update(members)
        return self._begin(Step.SLEEP, message, members, now_ms)

    def wake(self, message: Wake, members: dict[str, str], now_ms: float) -> list[Instruction]:
        """Sends WAKE to every engine in ``members`` (name to DP group)."""
        self._go(_E.WAKE_ASKED)
        return self._begin(Step.WAKE, message, members, now_ms)

    def on_ack(self, name: str, ack: Ack, now_ms: float) -> list[Instruction]:
        """Records an engine's ACK of a step; duplicate and old ACKs change nothing."""
        return self._check_barrier() if self._is_last_ack(name, ack, now_ms) else []

    def on_refused(self, name: str, step: str, failure: Failure) -> list[Instruction]:
        """Records an engine's refusal; the step continues with the others."""
        current = self.barrier
        if current is None or step != current.step or name not in current.waiting:
            return []
        self._failure = self._failure or failure
        current.waiting.remove(name)
        return self._check_barrier() if current.is_done else []

    def on_lost(self, name: str, failure: Failure) -> list[Instruction]:
        """Removes a lost engine from the sleep, with all ranks of its DP group."""
        gone = self._dp_group_of(name)
        for each in gone:
            del self.members[each]
        self.discarded.discard(name)
        current = self.barrier
        if current is None or not gone:
            return []
        self._failure = self._failure or failure
        current.remove(gone)
        return self._check_barrier() if current.is_done else []

    def on_committed(self, names: Iterable[str]) -> None:
        """Records that these engines have whole weights again."""
        self.discarded.difference_update(names)

    def over(self) -> list[Instruction]:
        """Ends the sleep, because the pause has ended or no engine is left in it."""
        current, self.barrier = self.barrier, None
        self.discarded.clear()
        if self.state is not _S.AWAKE:
            self._go(_E.OVER)
        if current is None or self._failure is None:
            return []
        return [StepFailed(current.step, self._failure)]

    def _begin(
        self, step: Step, message: Sleep | Wake, members: dict[str, str], now_ms: float
    ) -> list[Instruction]:
        self.members = dict(members)
        self.update_id = message.update_id
        self._failure = None
        return self._ask(step, message, now_ms)

    def _check_barrier(self) -> list[Instruction]:
        assert self.barrier is not None
        done, self.barrier = self.barrier, None
        if self.state is _S.FALLING:
            self._go(_E.ALL_ASLEEP)
        else:
            self._go(_E.SOME_FAILED if self._failure else _E.ALL_AWAKE)
        if self._failure is not None:
            return [StepFailed(done.step, self._failure)]
        return [StepDone(done)]
