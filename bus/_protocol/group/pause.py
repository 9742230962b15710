"""Pauses a group in one phase or two, and resumes the group: the broker's side.

Two phases keep a rank from waiting in a collective for a peer rank that never pauses. If every DP
group of the pause has one rank, there are no peer ranks, and one phase is enough: an engine answers
PAUSE_LOCAL with ``one_phase`` by the ack of the step pause_global.

Invariants:

- With two phases, PAUSE_GLOBAL is sent only after every rank has acknowledged PAUSE_LOCAL.
- RESUME is sent only after every engine has acknowledged the step pause_global. So no engine gets a
  resume without a completed pause, and the group counts as paused only when every engine in it is.
- An engine that can't resume does not delay the others: their resume ends without it, and the
  trainer gets its name. It stays paused, and is asked again later
  (:mod:`bus._protocol.group.group`).
- A half-made pause is never undone. The first fault is recorded as the failure: an engine that is
  lost or refuses, a lost trainer, a RESUME that came too early, a timeout. The pause is
  completed on the remaining engines, and then all resume, once.
- The unit is the DP group: if a rank is lost, all its ranks drop out. A rank that refuses does not,
  because its peer ranks' pauses complete only with its own. It is asked again until it has paused,
  or until the caller removes its DP group by :meth:`PauseMachine.on_lost`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from bus._protocol.core.failures import Failure
from bus._protocol.core.instructions import Ask, Instruction, StepDone, StepFailed
from bus._protocol.core.step_machine import StepMachine
from bus.messages import NackCode, PauseGlobal, PauseLocal, Resume, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Ack


class PauseState(StrEnum):
    """Progress of a group's pause."""

    RUNNING = "running"
    LOCAL = "local"
    GLOBAL = "global"
    PAUSED = "paused"
    RESUMING = "resuming"


class PauseEvent(StrEnum):
    ASKED = "asked"
    ONE_PHASE_ASKED = "one_phase_asked"
    ALL_LOCAL = "all_local"
    ALL_GLOBAL = "all_global"
    ALL_GLOBAL_FAILED = "all_global_failed"
    RESUME_ASKED = "resume_asked"
    ALL_RESUMED = "all_resumed"
    NO_ENGINES = "no_engines"


_S, _E = PauseState, PauseEvent

TRANSITIONS: Final[dict[tuple[PauseState, PauseEvent], PauseState]] = {
    (_S.RUNNING, _E.ASKED): _S.LOCAL,  # PAUSE_LOCAL to every rank, at once
    (_S.LOCAL, _E.ALL_LOCAL): _S.GLOBAL,  # PAUSE_GLOBAL to every rank
    # No engine has peer ranks: PAUSE_LOCAL(one_phase) to every engine.
    (_S.RUNNING, _E.ONE_PHASE_ASKED): _S.GLOBAL,
    (_S.GLOBAL, _E.ALL_GLOBAL): _S.PAUSED,  # the trainer gets: paused
    (_S.GLOBAL, _E.ALL_GLOBAL_FAILED): _S.RESUMING,  # RESUME to every rank: the failed pause ends
    (_S.PAUSED, _E.RESUME_ASKED): _S.RESUMING,  # RESUME to every rank
    # The trainer gets: resumed; or, after a failure, why there was no pause.
    (_S.RESUMING, _E.ALL_RESUMED): _S.RUNNING,
    # No engine is left. (A rank's refusal changes no state: the request is repeated.)
    **{(state, _E.NO_ENGINES): _S.RUNNING for state in _S if state is not _S.RUNNING},
}


class PauseMachine(StepMachine[PauseState, PauseEvent]):
    """Tracks the pause of one group. Methods take an event or command, and return instructions.

    ``kept_paused`` returns the engines that stay paused at a resume, such as quarantined ones.
    """

    def __init__(
        self,
        kept_paused: Callable[[], frozenset[str]] = frozenset,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__("pause", TRANSITIONS, _S.RUNNING)
        self._kept_paused = kept_paused
        self._version = version
        self.failure: Failure | None = None
        self.unresumed: dict[str, Failure] = {}  # engines that did not resume, and why
        self.asked_ms = 0.0
        self.deadline_ms: float | None = None
        self._asked: PauseLocal | None = None
        self._again: set[str] = set()  # ranks whose pause failed, to ask again

    def ask(self, message: PauseLocal, members: dict[str, str], now_ms: float) -> list[Instruction]:
        """Asks every engine in ``members`` (name to DP group) to pause, at once."""
        one_phase = len(set(members.values())) == len(members)
        self._go(_E.ONE_PHASE_ASKED if one_phase else _E.ASKED)
        self.update_id = message.update_id
        self.members = dict(members)
        self.failure = None
        self.unresumed = {}
        self.asked_ms = now_ms
        self.deadline_ms = now_ms + message.timeout_ms
        self._asked = replace(message, one_phase=one_phase)
        self._again.clear()
        step = Step.PAUSE_GLOBAL if one_phase else Step.PAUSE_LOCAL
        return self._ask(step, self._asked, now_ms)

    def resume(self, now_ms: float) -> list[Instruction]:
        """Resumes every engine, except those that must stay paused.

        If the pause is not complete yet, this is recorded as its failure, and the resume follows
        its completion.
        """
        if self.state in (_S.LOCAL, _S.GLOBAL):
            self.fail(
                Failure(NackCode.CANCELLED, "a resume was requested before the pause was complete")
            )
            return []
        return self._resume(_E.RESUME_ASKED, now_ms)

    def fail(self, failure: Failure) -> None:
        """Records why the pause under way must end; keeps the first reason."""
        if self.state in (_S.LOCAL, _S.GLOBAL) and self.failure is None:
            self.failure = failure

    def on_ack(self, name: str, ack: Ack, now_ms: float) -> list[Instruction]:
        """Records an engine's ACK of a step; duplicate and old ACKs change nothing."""
        return self._check_barrier(now_ms) if self._is_last_ack(name, ack, now_ms) else []

    def on_refused(self, name: str, failure: Failure, now_ms: float) -> list[Instruction]:
        """Handles an engine's refusal: the pause fails, or the resume continues without it.

        An engine alone drops out; a rank with peer ranks is asked again, see :meth:`retry`.
        """
        self.fail(failure)
        if name not in self.members:
            return []
        if self._dp_group_of(name) == [name]:
            return self.on_lost(name, failure, now_ms)
        if self.state in (_S.LOCAL, _S.GLOBAL):
            self._again.add(name)
            if self.barrier is not None and self.state is _S.GLOBAL:
                self.barrier.waiting.add(name)
        return []

    def retry(self) -> list[Instruction]:
        """Returns all unanswered requests, to be repeated in order."""
        current = self.barrier
        if current is None:
            return []
        instructions: list[Instruction] = []
        again = tuple(sorted(self._again))
        if again and self._asked is not None:
            self._again.clear()
            instructions.append(Ask(self._asked, again))
        if current.waiting:
            instructions.append(Ask(current.messages[0], tuple(sorted(current.waiting))))
        return instructions

    def on_lost(self, name: str, failure: Failure, now_ms: float) -> list[Instruction]:
        """Removes a lost engine from the pause, with all ranks of its DP group."""
        if name not in self.members:
            return []
        self.fail(failure)
        gone = self._dp_group_of(name)
        for each in gone:
            del self.members[each]
        self._again.difference_update(gone)
        if self.state is _S.RESUMING:
            self.unresumed.update(dict.fromkeys(gone, failure))
        if not self.members:
            return self._on_no_engines()
        if self.barrier is not None:
            self.barrier.remove(gone)
            if self.barrier.is_done:
                return self._check_barrier(now_ms)
        return []

    def expire(self, now_ms: float, describe: Callable[[str], str] = str) -> list[Instruction]:
        """Answers the caller with a timeout if its time is over; the pause itself continues.

        ``describe`` returns the text for an engine that has not answered.
        """
        if self.deadline_ms is None or now_ms < self.deadline_ms:
            return []
        self.deadline_ms = None
        if self.barrier is None or self.state not in (_S.LOCAL, _S.GLOBAL):
            return []
        waiting = ", ".join(describe(name) for name in sorted(self.barrier.waiting)[:8])
        failure = Failure(
            NackCode.TIMEOUT,
            f"no {self.barrier.step.value} ack after {now_ms - self.asked_ms:.0f} ms from: "
            f"{waiting}; the pause will be completed and then resumed",
            peer=min(self.barrier.waiting),
        )
        self.fail(failure)
        return [StepFailed(Step.PAUSE_GLOBAL, failure)]

    def _check_barrier(self, now_ms: float) -> list[Instruction]:
        assert self.barrier is not None
        done = self.barrier
        self.barrier = None
        if self.state is _S.LOCAL:
            self._go(_E.ALL_LOCAL)
            return [
                StepDone(done),
                *self._ask(Step.PAUSE_GLOBAL, PauseGlobal(self.update_id), now_ms),
            ]
        if self.state is _S.GLOBAL and self.failure is None:
            self._go(_E.ALL_GLOBAL)
            self.deadline_ms = None
            return [StepDone(done)]
        if self.state is _S.GLOBAL:
            self.deadline_ms = None
            return self._resume(_E.ALL_GLOBAL_FAILED, now_ms)
        self._go(_E.ALL_RESUMED)
        self.members.clear()
        if self.failure is not None:
            failed = StepFailed(Step.PAUSE_GLOBAL, self.failure)
            return [failed, StepDone(done)]
        return [StepDone(done)]

    def _resume(self, event: PauseEvent, now_ms: float) -> list[Instruction]:
        for name in self._kept_paused().intersection(self.members):
            del self.members[name]
        if not self.members:
            return self._on_no_engines()
        self._go(event)
        return self._ask(Step.RESUME, Resume(self.update_id, self._version()), now_ms)

    def _on_no_engines(self) -> list[Instruction]:
        # After a failed pause, answers are due to its request and to a RESUME that came early.
        made = self.failure is None
        steps = (Step.RESUME,) if made else (Step.PAUSE_GLOBAL, Step.RESUME)
        self._go(_E.NO_ENGINES)
        self.barrier = None
        self.deadline_ms = None
        failure = (
            self.failure
            or next(iter(self.unresumed.values()), None)
            or Failure(
                NackCode.EMPTY_GROUP,
                "no engine is left in the pause",
                hint="quarantined engines resume after an update of all weights",
            )
        )
        return [StepFailed(step, failure) for step in steps]
