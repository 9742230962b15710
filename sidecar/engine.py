"""What a sidecar needs of an engine, whatever stands behind it.

An adapter is dumb on purpose: no timeouts, no retries, no memory of epochs. The
machine in :mod:`bus.protocol.engine.session` decides what may be called when;
it never runs two calls of one engine at the same time, apart from
:meth:`Engine.in_flight` and :meth:`Engine.died`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import anyio

from bus.errors import EngineError
from bus.manifest import Chunk, Manifest, TensorMeta
from bus.messages import (
    NO_LIMITS,
    CanaryMode,
    EngineFacts,
    NackCode,
    PauseMode,
    ProbeResult,
    RequestLimits,
    SleepLevel,
    Staging,
    Target,
    Verify,
)
from bus.weight_transfer.allocation import RankAssignment, StagingCapacity
from sidecar.shared_pages.core_status import CoreStatusView
from sidecar.shared_pages.pause_lease import AbandonedPause, LeaseOutcome, PauseLease

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "CanaryMode",
    "Chunk",
    "CoreStatusView",
    "Engine",
    "EngineInfo",
    "PauseLease",
    "LeaseOutcome",
    "AbandonedPause",
    "Manifest",
    "PauseMode",
    "RankAssignment",
    "ProbeResult",
    "StagingCapacity",
    "SleepLevel",
    "Staging",
    "Target",
    "TensorMeta",
    "Verify",
    "answers_within",
    "require_model",
]

# How long an engine that has booted may take to answer what a starting sidecar asks.
START_ANSWER_S: Final = 120.0


@contextlib.contextmanager
def answers_within(limit_s: float, who: str) -> Iterator[None]:
    """Bound how long the block waits for an engine, in seconds.

    Raises:
        EngineError: code ``timeout``: the engine has not answered.
    """
    try:
        with anyio.fail_after(limit_s):
            yield
    except TimeoutError as error:
        raise EngineError(
            f"{who} did not answer for {limit_s:g} s: it may be stuck in a pause or a collective; "
            "restart it, with all ranks of its DP group",
            code=NackCode.TIMEOUT,
        ) from error


# Of a refusal of experts by names that the model doesn't have.
FUSED_HINT = (
    "the checkpoint has one tensor per expert (experts.0.up_proj.weight), transformers fuses them: "
    "send the model itself, its state dict with config=, or the checkpoint's names"
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is. Fields as in :class:`bus.messages.EngineFacts`. ``closed``: its admission
    was found so, as a quarantine leaves it; ``booted_closed``: it was so since the engine booted.
    ``ends_with_sidecar``: its adapter stops it when it is closed itself."""

    kind: str
    software: str
    model: str
    dp_rank: int
    dp_size: int
    workers: int
    backends: tuple[str, ...]
    endpoint: str
    can_sleep: bool = False
    draft: bool = False
    canary: CanaryMode = ""
    closed: bool = False
    booted_closed: bool = False
    ends_with_sidecar: bool = False
    features: Mapping[str, str] = field(default_factory=dict)
    untested: str = ""
    dtype: str = ""
    limits: RequestLimits = NO_LIMITS
    kv_connectors: Mapping[str, str] = field(default_factory=dict)

    def facts(self, **placed: Any) -> EngineFacts:
        """What a JOIN says of the engine; ``placed``: what only its sidecar knows."""
        names = {each.name for each in fields(EngineFacts)} - placed.keys()
        found: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name in names
        }
        return EngineFacts(**found, **placed)


@runtime_checkable
class Engine(Protocol):
    """One inference engine client: an ``AsyncLLM``, an API server, an embedded engine.

    Every method but ``died`` and ``in_flight`` raises :class:`bus.errors.EngineError`
    when the engine refuses or fails, and :class:`bus.errors.EngineDead` when it is gone.
    """

    async def start(self) -> EngineInfo:
        """Bring the engine up (or reach one that runs); return when it takes requests."""

    async def close(self) -> None:
        """Let it go. What the adapter started, it stops; what it attached to, runs on."""

    async def died(self) -> str:
        """Return only when the engine is dead or unreachable for good, with the reason."""

    async def in_flight(self) -> int:
        """How many requests it holds (running, waiting or frozen by a pause)."""

    async def request_ids(self) -> tuple[str, ...]:
        """The ids of those requests, as their clients know them; empty if it can't tell."""

    def core_view(self) -> CoreStatusView | None:
        """The status page of its core, as it is now; None without one. Never blocks."""

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        """Have the engine end its pause by itself when that hold is over, and nobody has renewed it
        (:mod:`sidecar.shared_pages.pause_lease`); None: there is no pause any more. Never blocks.

        Returns what the engine has made of that hold already: then nothing was renewed. None
        where it stands; and always where the engine ends with its sidecar.
        """

    def abandoned_pause(self) -> AbandonedPause | None:
        """In what pause the engine was found when it started, as an earlier sidecar has left it;
        None: in none."""

    async def version(self) -> int:
        """The weight version it serves; 0 until the first commit."""

    async def join_run(self, run: str) -> None:
        """Salt the caches with this run's id: keys and values of another run are never found.

        Called before any other call of a session that has joined a group, and again where the
        group's run has become another one.
        """

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop generation; return when the engine is idle on its device.

        ``keep`` freezes requests, ``wait`` lets running ones end and queues or
        rejects new ones, ``abort`` ends all with the tokens they have. ``clear_cache`` drops
        KV and prefix cache, so that kept requests are recomputed after the resume.
        """

    async def resume(self) -> None:
        """Schedule again. Called only after a pause has returned, and with all memory there."""

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back: the KV cache's and the weights', which level 1 keeps in the host's
        memory. Called only in a pause that has dropped the KV cache.

        Nothing may wait for other ranks of its DP group: they may refuse.
        """

    async def wake_weights(self) -> None:
        """Take the weights' memory again. After level 2 anything may stand in it."""

    async def wake(self) -> None:
        """Take again whatever memory sleeps, all or some of it, and schedule again: what
        :meth:`resume` is for an engine that is awake. Awake already, that is all it does."""

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - what admission is
        """Open or close admission. While it is closed, every request that comes is ended at once,
        with no tokens (finish reason ``abort``; over HTTP status 503, with the reason), whoever
        sends it and whether the engine is paused or not. It stays so until it is opened, whatever
        becomes of the sidecar."""

    async def abort_requests(self) -> int:
        """End every request with the tokens it has, paused or not; return how many."""

    async def clear_cache(self) -> None:
        """Drop keys, values and prefix cache, so that kept requests are recomputed after the
        resume: what a pause with ``clear_cache`` does. Called only in a pause that has returned."""

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:
        """Open the out-of-band transport (again, with new params, replaces it). Returns how many
        chunks may be received before the first of them is loaded; at least one.

        ``assignment``: where the engine's first worker stands in the communicator; its other
        workers follow.

        Raises:
            EngineError: with code ``backend_missing`` for a backend it lacks, and
                ``transfer_failed`` when the other end can't be reached.
        """

    async def arm(
        self, manifest: Manifest, target: Target = "model", staging: Staging | None = None
    ) -> StagingCapacity:
        """Check the manifest against the target; load nothing, change nothing. With ``staging``,
        say what it takes to stage the update so, and why that can't be.

        Raises:
            EngineError: with code ``manifest_refused`` and ``tensor`` set, for an
                unknown, missing or misshapen tensor, a wrong dtype, or half of a
                fused parameter; and of a draft, for a tensor that it shares with the model.
                With code ``draft_missing`` where there is no draft that can be updated; and
                ``staging_refused``, where the staging is required and can't be. With code
                ``kv_connector_refused``, where a KV connector would give keys and values of the
                weights before.
        """

    async def start_update(
        self, *, recover: bool, target: Target = "model", staged: bool = False
    ) -> None:
        """Get ready to load into the target. ``recover``: an earlier update, of whichever
        target, broke off after a load. ``staged``, as it was armed: :meth:`load` puts chunks
        beside the weights, while the engine serves; then come :meth:`finish_update` and
        :meth:`swap`, or :meth:`restore`."""

    async def receive(self, chunk: Chunk) -> None:
        """Fetch the chunk's tensors into staging; the model is untouched. With room for several
        chunks it may return before they are there, and :meth:`load` waits for them."""

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        """Load the received chunk into the model, and let the staging go. With ``sums``, compare
        its checksums first (:mod:`bus.weight_transfer.checksum`), in all workers before any of them
        loads.

        Raises:
            EngineError: code ``checksum_mismatch``, with the first tensor that differs; nothing
                of the chunk is loaded then.
        """

    async def restore(self, target: Target = "model") -> None:
        """After ``start_update`` of the target, and no load: bring its old weights back. Of a
        staged update: let go what is staged."""

    async def finish_update(self) -> None:
        """Every chunk is loaded: post-process."""

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        salt: str,
        *,
        mode: PauseMode,
        clear_cache: bool,
    ) -> tuple[ProbeResult, ...]:
        """Run these greedy probes, past any end of sequence, on the weights that are finished and
        not committed; paused before, and paused again when it returns. Nobody else is served
        meanwhile. All ranks of a DP group are called together, and return together.

        Args:
            prompts: token ids.
            max_tokens: how many tokens each gives.
            salt: no probe takes a part in what a prefix cache holds under another one.
            mode: how the engine was paused. With ``EngineInfo.canary`` ``abort``, the engine has
                no requests of before the pause, and those that come are ended.
            clear_cache: whether that pause cleared the caches.
        """

    async def commit(self, version: int) -> None:
        """Serve as this version from now on: a later one, or, of an engine that catches up, its own
        again."""

    async def swap(self, version: int, *, clear_cache: bool) -> None:
        """Put what is staged, all of it, in the place of the weights, and serve as this version:
        between two steps, in all workers between the same two, and in all ranks of the DP group.
        Returns when it is done; ranks that wait for each other do so while they serve the old
        version, and one that is not asked keeps all of them there.

        Args:
            version: as :meth:`commit` has it.
            clear_cache: requests drop keys and values, and compute them anew. Else they go on with
                those that they have; in both ways, requests that come later find none that were
                computed with older weights.

        Raises:
            EngineError: code ``called_off``, and nothing has changed; with any other code the
                weights may be mixed.
        """

    async def call_off(self) -> None:
        """Have a :meth:`swap` that still waits for other ranks raise ``called_off``, unless all of
        them have agreed. Called beside it."""


def require_model(target: Target) -> None:
    """For engines without speculative decoding.

    Raises:
        EngineError: code ``draft_missing``, for any target but the model.
    """
    if target != "model":
        raise EngineError("this engine has no draft model", code=NackCode.DRAFT_MISSING)
