"""Engine calls that the session's state machine requests, and the queue in which they wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from bus import messages as m
from bus.manifest import Chunk
from bus.protocol.core.effects import Effect, Send
from bus.vllm_payloads import is_loaded_on_receipt
from bus.weight_transfer.allocation import StagingCapacity

if TYPE_CHECKING:
    from bus.manifest import Manifest
    from bus.protocol.core.failures import Failure
    from bus.weight_transfer.allocation import RankAssignment


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
class CallOpenTransfer:
    """Engine call: open the engine's end of a transport.

    Attributes:
        update_id: the id that the trainer has chosen for opening the transport. No weights are
            updated; the answers name it as they name an update.
        backend: the transport's name.
        params: data from the sender that only the backend reads.
        assignment: the ranks of the engine's workers in the transport's communicator.
    """

    update_id: str
    backend: str
    params: bytes
    assignment: RankAssignment


@dataclass(frozen=True, slots=True)
class CallDrain:
    """Engine call: receive over the open transport, and discard what comes.

    Attributes:
        update_id: the id that the trainer has chosen for the drain, as in CallOpenTransfer.
        backend: the transport's name.
        handle: data from the sender that only the backend reads: what it sends.
        timeout_ms: how long to wait for the sender, in ms.
    """

    update_id: str
    backend: str
    handle: bytes
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class CallArm:
    """Engine call: check the manifest of an update.

    Attributes:
        manifest: the manifest.
        target: the model that the update is for.
        staging: how the update may be staged; None: it is loaded in a pause.
        drops_adapters: whether the engine first drops all LoRA adapters that came over the bus.
    """

    manifest: Manifest
    target: m.Target
    staging: m.Staging | None = None
    drops_adapters: bool = False


@dataclass(frozen=True, slots=True)
class CallExtend:
    """Engine call: check further tensors of an update whose manifest is open.

    ``part``: the manifest of these tensors alone.
    """

    part: Manifest


@dataclass(frozen=True, slots=True)
class CallStart:
    """Engine call: begin an update, so that chunks can be loaded.

    Attributes:
        recover: the engine lacks weights of some part, because an earlier update was interrupted or
            a sleep discarded them.
        target: the model that the update is for.
        staged: True: load into spare memory. False: overwrite the served weights.
    """

    recover: bool
    target: m.Target
    staged: bool = False


@dataclass(frozen=True, slots=True)
class CallReceive(Chunk):
    """Engine call: receive a chunk over the open transport.

    Transports of vLLM's own load the chunk at once. For all others a :class:`CallLoad` follows.
    """


@dataclass(frozen=True, slots=True)
class CallLoad:
    """Engine call: verify a received chunk, and load it if it is intact.

    Attributes:
        seq: the number of the chunk.
        verify: how much of the chunk is verified.
        sums: the expected checksums, one per tensor; empty: nothing is verified.
    """

    seq: int
    verify: m.Verify
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallRestore:
    """Engine call: end a started update that has not changed the served weights."""

    target: m.Target


@dataclass(frozen=True, slots=True)
class CallFinish:
    """Engine call: post-process the model's weights after the last chunk is loaded."""


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
class CallSwap:
    """Engine call: swap in the staged weights, between the same two steps on all ranks.

    Attributes:
        version: the version that the engine serves then.
        clear_cache: whether requests drop their KV cache and compute it again.
    """

    version: int
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class CallCancel:
    """Engine call: cancel the running call, which has no deadline of its own.

    That is a swap that has not swapped yet, or a staged receive over a transport of vLLM's own.
    This call never waits in the queue, because it is made beside the running call, whose result
    shows whether it was cancelled.
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
    | CallOpenTransfer
    | CallDrain
    | CallArm
    | CallExtend
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
    """Effect: send a lease vote to these peer ranks, over the direct link."""

    vote: m.LeaseVote
    ranks: tuple[int, ...]


SessionEffect: TypeAlias = Effect | Call | CallEscalate | CallCancel | SendToPeers
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
    CallDrain: m.Step.TRANSFER_DRAIN,
    CallArm: m.Step.ARM,
    CallExtend: m.Step.PART,
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
    """Engine calls in order, one at a time: the first one runs, the others wait."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, call: Call, reply_to: int) -> Call:
        """Adds a call after all others, and returns it.

        Args:
            call: the call.
            reply_to: the id of the command to answer when the call has returned; 0: none.
        """
        self._jobs.append(Job(call, reply_to))
        return call

    def add_first(self, call: Call, reply_to: int) -> None:
        """Adds a call before those that wait. No call may be running.

        Args:
            call: the call.
            reply_to: as in :meth:`add`.
        """
        assert not (self._jobs and self._jobs[0].issued), "a call runs"
        self._jobs.appendleft(Job(call, reply_to))

    def __contains__(self, call: Call) -> bool:
        return any(job.call == call for job in self._jobs)

    def running(self) -> Call | None:
        """Returns the call that runs, or else the next one; None: the queue is empty."""
        return self._jobs[0].call if self._jobs else None

    def cancellable(self, *, staged: bool) -> CallSwap | CallReceive | None:
        """Returns the running call that may wait for others for good; None: none.

        That is a swap, or a staged receive over a transport of vLLM's own.
        """
        running = self.running()
        if isinstance(running, CallSwap):
            return running
        if isinstance(running, CallReceive) and staged and is_loaded_on_receipt(running.backend):
            return running
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
    """Returns the effect that acknowledges the command ``reply_to``.

    The other arguments are as in :class:`bus.messages.Ack`; ``took_ms`` is its duration.
    """
    took_ms = round(took_ms, 3)
    return Send(
        m.Ack(step, update_id, chunk, in_flight, took_ms, outcome, waited_for), reply_to=reply_to
    )


def nack(reply_to: int, step: str, failure: Failure, update_id: str, chunk: int = 0) -> Send:
    """Returns the effect that refuses the command ``reply_to``; the rest as in Failure.nack."""
    return Send(failure.nack(step, update_id, chunk), reply_to=reply_to)
