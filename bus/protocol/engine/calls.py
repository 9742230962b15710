"""Engine calls that the session machine requests, and the queue in which they wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from bus import messages as m
from bus.manifest import Chunk
from bus.protocol.core.effects import Effect, Send
from bus.weight_transfer.allocation import StagingCapacity

if TYPE_CHECKING:
    from bus.manifest import Manifest
    from bus.protocol.core.failures import Failure
    from bus.weight_transfer.allocation import RankAssignment


@dataclass(frozen=True, slots=True)
class CallPause:
    """Pauses the engine; with ``clear_cache``, drops its KV caches."""

    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallEscalate:
    """Pauses a second time while the `wait` pause still drains; both calls must return.

    It never waits in the queue. The ids of requests that still run are read before the call.
    """

    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallSleep:
    """Frees the engine's memory: level 1 keeps a copy of the weights, level 2 none."""

    level: m.SleepLevel


@dataclass(frozen=True, slots=True)
class CallWakeWeights:
    """Allocates the memory of sleeping weights again."""


@dataclass(frozen=True, slots=True)
class CallStrengthenPause:
    """Ends requests or clears caches that the present pause has kept.

    ``aborts``: end requests with their tokens so far. ``clears``: drop KV and prefix caches.
    """

    aborts: bool
    clears: bool


@dataclass(frozen=True, slots=True)
class CallResume:
    """Resumes the engine. ``asleep``: wakes all its memory. ``opens``: opens admission first."""

    asleep: bool = False
    opens: bool = False


@dataclass(frozen=True, slots=True)
class CallOpenTransfer:
    """Opens the engine's end of a transport."""

    update_id: str
    backend: str
    params: bytes
    assignment: RankAssignment


@dataclass(frozen=True, slots=True)
class CallArm:
    """Checks the manifest of an update. ``staging``: as in ARM."""

    manifest: Manifest
    target: m.Target
    staging: m.Staging | None = None


@dataclass(frozen=True, slots=True)
class CallStart:
    """Begins an update.

    ``recover``: an update, of this target or the other, broke off after a load. ``staged``: the
    update is staged in spare memory.
    """

    recover: bool
    target: m.Target
    staged: bool = False


@dataclass(frozen=True, slots=True)
class CallReceive(Chunk):
    """Receives a chunk."""


@dataclass(frozen=True, slots=True)
class CallLoad:
    """Loads a received chunk, if its ``sums`` match or are empty."""

    seq: int
    verify: m.Verify
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallRestore:
    """Restores the old weights of an update that has loaded nothing."""

    target: m.Target


@dataclass(frozen=True, slots=True)
class CallFinish:
    """Post-processes the model's weights after the last chunk is loaded."""


@dataclass(frozen=True, slots=True)
class CallProbe:
    """Resumes for these probes alone, then pauses again in the same mode."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    salt: str
    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallCommit:
    """Serves this version."""

    version: int


@dataclass(frozen=True, slots=True)
class CallSwap:
    """Swaps in the staged weights between two steps, at the same step on all ranks."""

    version: int
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallCancelSwap:
    """Cancels the swap under way, if it is not made yet.

    It never waits in the queue. The result of the swap call shows whether the swap was made.
    """


@dataclass(frozen=True, slots=True)
class CallAbortRequests:
    """Closes admission, then ends every request with the tokens it has."""


@dataclass(frozen=True, slots=True)
class CallAdmit:
    """Opens admission of an engine that runs."""


Call: TypeAlias = (
    CallPause
    | CallStrengthenPause
    | CallSleep
    | CallWakeWeights
    | CallResume
    | CallOpenTransfer
    | CallArm
    | CallStart
    | CallReceive
    | CallLoad
    | CallRestore
    | CallFinish
    | CallProbe
    | CallCommit
    | CallSwap
    | CallAbortRequests
    | CallAdmit
)


@dataclass(frozen=True, slots=True)
class SendToPeers:
    """Sends a lease vote to these ranks of the DP group, over the direct link."""

    vote: m.LeaseVote
    ranks: tuple[int, ...]


SessionEffect: TypeAlias = Effect | Call | CallEscalate | CallCancelSwap | SendToPeers
# The result of a call. Pause or swap: how many requests the engine has. Opening: how many
# chunks may be received ahead. ARM: whether the update can be staged. Probe: its results.
CallResult: TypeAlias = int | StagingCapacity | tuple[m.ProbeResult, ...] | None

COMMANDS: Final = frozenset(m.STEPS)
CALL_STEPS: Final[dict[type[Call], m.Step]] = {
    CallPause: m.Step.PAUSE_GLOBAL,
    CallStrengthenPause: m.Step.PAUSE_GLOBAL,
    CallSleep: m.Step.SLEEP,
    CallWakeWeights: m.Step.WAKE,
    CallResume: m.Step.RESUME,
    CallOpenTransfer: m.Step.TRANSFER_INIT,
    CallArm: m.Step.ARM,
    CallStart: m.Step.START,
    CallReceive: m.Step.CHUNK,
    CallLoad: m.Step.CHUNK,
    CallRestore: m.Step.ABORT,
    CallFinish: m.Step.FINISH,
    CallProbe: m.Step.PROBE,
    CallCommit: m.Step.COMMIT,
    CallSwap: m.Step.COMMIT,
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
    """One engine call, with the id of the command to answer (``reply_to``)."""

    call: Call
    reply_to: int
    since_ms: float = 0.0
    issued: bool = False


class CallQueue:
    """Engine calls in order, one at a time: the first one runs, the others wait."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, call: Call, reply_to: int) -> Call:
        """Adds a call after all others, and returns it."""
        self._jobs.append(Job(call, reply_to))
        return call

    def add_first(self, call: Call, reply_to: int) -> None:
        """Adds a call before those that wait. No call may be running."""
        assert not (self._jobs and self._jobs[0].issued), "a call runs"
        self._jobs.appendleft(Job(call, reply_to))

    def __contains__(self, call: Call) -> bool:
        return any(job.call == call for job in self._jobs)

    def running(self) -> Call | None:
        """Returns the call that runs, or is next."""
        return self._jobs[0].call if self._jobs else None

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
        """Drops calls that would strengthen the pause; returns whether there was one."""
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
    """Returns the effect that sends an engine's ACK."""
    took_ms = round(took_ms, 3)
    return Send(
        m.Ack(step, update_id, chunk, in_flight, took_ms, outcome, waited_for), reply_to=reply_to
    )


def nack(reply_to: int, step: str, failure: Failure, update_id: str, chunk: int = 0) -> Send:
    """Returns the effect that sends an engine's NACK."""
    return Send(failure.nack(step, update_id, chunk), reply_to=reply_to)
