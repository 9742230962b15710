"""Defines the engine calls that the session machine requests, and their queue.

The steps of an update are operations (:mod:`bus.operations`). All other calls are defined here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from bus import messages as m
from bus import operations as ops
from bus._protocol.core.effects import Effect, Send
from bus._vllm.payloads import is_loaded_on_receipt

if TYPE_CHECKING:
    from bus._protocol.core.failures import Failure


@dataclass(frozen=True, slots=True)
class CallPause:
    """Engine call: pause the engine.

    Attributes:
        mode: how the pause treats requests.
        clear_cache: whether the pause drops KV caches.
    """

    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallEscalate:
    """Engine call: pause again, because the deadline of a `wait` pause has passed.

    The first pause call still waits for requests, so this one is made beside it and never waits in
    the queue. The pause is complete when both calls have returned. The ids of the requests that
    still run are read before the call.

    Attributes:
        mode: how the second pause treats these requests.
        clear_cache: whether the pause drops KV caches.
    """

    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallSleep:
    """Engine call: free the engine's memory. Level 1 keeps a copy of the weights, level 2 none.

    Attributes:
        level: the level.
        clears: whether KV caches are dropped first, because the pause has kept them.
    """

    level: m.SleepLevel
    clears: bool = False


@dataclass(frozen=True, slots=True)
class CallWakeWeights:
    """Engine call: allocate the memory of sleeping weights again."""


@dataclass(frozen=True, slots=True)
class CallStrengthenPause:
    """Engine call: end requests or clear caches that the present pause has kept.

    Attributes:
        aborts: whether to end requests, with their tokens so far.
        clears: whether to drop KV and prefix caches.
    """

    aborts: bool
    clears: bool


@dataclass(frozen=True, slots=True)
class CallResume:
    """Engine call: resume the engine.

    Attributes:
        asleep: the engine sleeps, so all its memory is woken first.
        opens: admission is closed, and is opened before the resume.
    """

    asleep: bool = False
    opens: bool = False


@dataclass(frozen=True, slots=True)
class CallProbe:
    """Engine call: resume for these probes alone, then pause again as before.

    Attributes:
        prompts: token ids of each prompt.
        max_tokens: how many tokens to generate per prompt.
        salt: differs for each update, so that probes never match entries of prefix caches.
        mode: the mode of the pause.
        clear_cache: whether the pause drops KV caches.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    salt: str
    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallCommit:
    """Engine call: serve the loaded weights as ``version`` from now on."""

    version: int


@dataclass(frozen=True, slots=True)
class CallCancel:
    """Engine call: cancel the running call, which has no deadline of its own.

    The running call is a swap that has not swapped yet, or a staged receive over a transport of
    vLLM's own. CallCancel never waits in the queue: it is made beside the running call, whose
    result shows whether it was cancelled.
    """


@dataclass(frozen=True, slots=True)
class CallAbortRequests:
    """Engine call: close admission, then end every request with the tokens it has."""


@dataclass(frozen=True, slots=True)
class CallAdmit:
    """Engine call: open admission of an engine that runs."""


Call: TypeAlias = (
    CallPause
    | CallStrengthenPause
    | CallSleep
    | CallWakeWeights
    | CallResume
    | CallProbe
    | CallCommit
    | CallAbortRequests
    | CallAdmit
    | ops.UpdateOperation
)


SessionEffect: TypeAlias = Effect | Call | CallEscalate | CallCancel
# The result of a call. Pause: how many requests the engine has. Probe: its results.
CallResult: TypeAlias = int | ops.Done | tuple[m.ProbeResult, ...] | None

COMMANDS: Final = frozenset(m.STEPS)
CALL_STEPS: Final[dict[type[Call], m.Step]] = {
    CallPause: m.Step.PAUSE_GLOBAL,
    CallStrengthenPause: m.Step.PAUSE_GLOBAL,
    CallSleep: m.Step.SLEEP,
    CallWakeWeights: m.Step.WAKE,
    CallResume: m.Step.RESUME,
    ops.Open: m.Step.TRANSFER_INIT,
    ops.Drain: m.Step.TRANSFER_DRAIN,
    ops.ArmManifest: m.Step.ARM,
    ops.Extend: m.Step.PART,
    ops.Start: m.Step.START,
    ops.ReceiveChunk: m.Step.CHUNK,
    ops.LoadChunk: m.Step.CHUNK,
    ops.Restore: m.Step.ABORT,
    ops.Finish: m.Step.FINISH,
    CallProbe: m.Step.PROBE,
    CallCommit: m.Step.COMMIT,
    ops.SwapStaged: m.Step.COMMIT,
    CallAbortRequests: m.Step.ABORT,
}
_NOT_THE_UPDATES: Final = (
    CallPause,
    CallStrengthenPause,
    CallSleep,
    CallWakeWeights,
    CallResume,
    CallAdmit,
)


@dataclass(slots=True)
class Job:
    """One engine call in the queue.

    Attributes:
        call: the call.
        reply_to: the id of the command to answer when the call has returned; 0: none.
        since_ms: when the call was made.
        issued: whether the call was made.
    """

    call: Call
    reply_to: int
    since_ms: float = 0.0
    issued: bool = False


class CallQueue:
    """A queue of engine calls: the first call runs, and the others wait."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, call: Call, reply_to: int) -> Call:
        """Adds a call after all others, and returns it.

        Args:
            reply_to: the id of the command to answer when the call has returned; 0: none.
        """
        self._jobs.append(Job(call, reply_to))
        return call

    def add_first(self, call: Call, reply_to: int) -> None:
        """Adds a call before those that wait. No call may be running.

        Args:
            reply_to: as in :meth:`add`.
        """
        assert not (self._jobs and self._jobs[0].issued), "a call runs"
        self._jobs.appendleft(Job(call, reply_to))

    def __contains__(self, call: Call) -> bool:
        return any(job.call == call for job in self._jobs)

    def running(self) -> Call | None:
        """Returns the first call, which runs or is about to; None: the queue is empty."""
        return self._jobs[0].call if self._jobs else None

    def cancellable(self) -> ops.SwapStaged | ops.ReceiveChunk | None:
        """Returns the running call if it may wait for ever: a swap, or a staged receive.

        A receive may wait for ever only over a transport of vLLM's own.
        """
        running = self.running()
        if isinstance(running, ops.SwapStaged):
            return running
        if isinstance(running, ops.ReceiveChunk) and running.staged:
            return running if is_loaded_on_receipt(running.backend) else None
        return None

    def end(self, call: Call) -> Job:
        """Removes the running call after it has ended, and returns its job."""
        job = self._jobs.popleft()
        assert job.call is call, f"{call} ended, but {job.call} was running"
        return job

    def drop_waiting(self) -> None:
        """Drops an update's waiting calls; calls of a pause or a sleep stay."""
        self._jobs = deque(
            job for job in self._jobs if job.issued or isinstance(job.call, _NOT_THE_UPDATES)
        )

    def drop_strengthening(self) -> bool:
        """Drops calls that would strengthen the pause; returns whether any was dropped."""
        jobs = [job for job in self._jobs if not isinstance(job.call, CallStrengthenPause)]
        dropped = len(jobs) < len(self._jobs)
        self._jobs = deque(jobs)
        return dropped

    def issue(self, now_ms: float) -> list[Call]:
        """Returns the call to make now, if any, and marks it as running."""
        if not self._jobs or self._jobs[0].issued:
            return []
        job = self._jobs[0]
        job.issued = True
        job.since_ms = now_ms
        return [job.call]


def ack(
    reply_to: int,
    step: m.Step,
    update_id: str,
    *,
    chunk: int = 0,
    in_flight: int = 0,
    took_ms: float = 0.0,
    outcome: str = "",
    waited_for: tuple[str, ...] = (),
) -> Send:
    """Returns the effect that acknowledges the command ``reply_to``.

    The other arguments are as in :class:`bus.messages.Ack`; ``took_ms`` is its duration.
    """
    took_ms = round(took_ms, 3)
    return Send(
        m.Ack(step, update_id, chunk, in_flight, took_ms, outcome, waited_for), reply_to=reply_to
    )


def nack(reply_to: int, step: str, failure: Failure, update_id: str, chunk: int = 0) -> Send:
    """Returns the effect that refuses the command ``reply_to``."""
    return Send(failure.nack(step, update_id, chunk), reply_to=reply_to)
