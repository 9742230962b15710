"""Engine calls as the session machine asks for them, and the queue they wait in."""

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
    """Pause the engine; with ``clear_cache``, drop its KV caches."""

    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallEscalate:
    """Pause a second time, beside the `wait` pause that still drains; both are awaited.

    It never waits in the queue. The requests that are waited for are read before it.
    """

    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallSleep:
    """Give memory back."""

    level: m.SleepLevel


@dataclass(frozen=True, slots=True)
class CallWakeWeights:
    """Allocate the weights' memory."""


@dataclass(frozen=True, slots=True)
class CallStrengthenPause:
    """Do what another pause asks for beyond the present one.

    ``aborts``: end requests with their tokens so far. ``clears``: drop KV and prefix caches.
    """

    aborts: bool
    clears: bool


@dataclass(frozen=True, slots=True)
class CallResume:
    """``asleep``: by waking all that sleeps. ``opens``: admission, first."""

    asleep: bool = False
    opens: bool = False


@dataclass(frozen=True, slots=True)
class CallOpenTransfer:
    """Open the engine's end of a transport."""

    update_id: str
    backend: str
    params: bytes
    assignment: RankAssignment


@dataclass(frozen=True, slots=True)
class CallArm:
    """``staging``: as ARM has it."""

    manifest: Manifest
    target: m.Target
    staging: m.Staging | None = None


@dataclass(frozen=True, slots=True)
class CallStart:
    """Begin an update.

    ``recover``: an update, of this target or the other, broke off after a load. ``staged``: the
    update is staged in spare memory.
    """

    recover: bool
    target: m.Target
    staged: bool = False


@dataclass(frozen=True, slots=True)
class CallReceive(Chunk):
    """Receive this chunk."""


@dataclass(frozen=True, slots=True)
class CallLoad:
    """Verified first, if there are ``sums``; nothing is loaded of what is not what was sent."""

    seq: int
    verify: m.Verify
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallRestore:
    """Keep the weights of before the update, of which nothing was loaded."""

    target: m.Target


@dataclass(frozen=True, slots=True)
class CallFinish:
    """Finish the model: every chunk is loaded."""


@dataclass(frozen=True, slots=True)
class CallProbe:
    """Resume for these probes alone, and pause again, as the pause was made."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    salt: str
    mode: m.PauseMode
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallCommit:
    """Serve this version."""

    version: int


@dataclass(frozen=True, slots=True)
class CallSwap:
    """Between two steps, the same one on all ranks of the DP group, take what is staged."""

    version: int
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallCancelSwap:
    """Cancel the swap under way, if it is not made yet.

    It never waits in the queue. The swap's own return says which it was.
    """


@dataclass(frozen=True, slots=True)
class CallAbortRequests:
    """Close admission, then end every request with the tokens it has."""


@dataclass(frozen=True, slots=True)
class CallAdmit:
    """Open admission of an engine that runs."""


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
    """Tell these ranks of the DP group, over the direct link."""

    vote: m.LeaseVote
    ranks: tuple[int, ...]


SessionEffect: TypeAlias = Effect | Call | CallEscalate | CallCancelSwap | SendToPeers
# What a call has told: a pause or a swap how many requests the engine has, an opening how many
# chunks may be received ahead, an arming whether the update can be staged, a probe what it gave.
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
    """One engine call with what its ack needs. ``reply_to`` is the command's id."""

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
        """Run it when those before it have ended; the call."""
        self._jobs.append(Job(call, reply_to))
        return call

    def add_first(self, call: Call, reply_to: int) -> None:
        """Run it next, before what waits. Only while nothing runs."""
        assert not (self._jobs and self._jobs[0].issued), "a call runs"
        self._jobs.appendleft(Job(call, reply_to))

    def __contains__(self, call: Call) -> bool:
        return any(job.call == call for job in self._jobs)

    def running(self) -> Call | None:
        """The call that runs, or is about to."""
        return self._jobs[0].call if self._jobs else None

    def end(self, call: Call) -> Job:
        """The running call has returned or raised."""
        job = self._jobs.popleft()
        assert job.call is call, f"{call} ended, but {job.call} was running"
        return job

    def drop_waiting(self) -> None:
        """An update's calls that don't run yet will not; a pause's still do."""
        self._jobs = deque(
            job for job in self._jobs if job.issued or isinstance(job.call, _NOT_THE_UPDATES)
        )

    def drop_strengthening(self) -> bool:
        """A pause that waits to be strengthened will not be; whether one did."""
        jobs = [job for job in self._jobs if not isinstance(job.call, CallStrengthenPause)]
        dropped = len(jobs) < len(self._jobs)
        self._jobs = deque(jobs)
        return dropped

    def issue(self, now_ms: float) -> list[Call]:
        """The call that is to be made now, if any."""
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
