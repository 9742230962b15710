"""The interface between a sidecar and its engine.

An adapter implements :class:`Engine` for one kind of engine. It has no timeouts, no retries and no
fencing epochs: the session machine (:mod:`bus._protocol.engine.session`) decides which call may be
made when. The sidecar makes one call at a time, with two exceptions.
:meth:`Engine.in_flight`, :meth:`Engine.died` and :meth:`Engine.call_off` may run during any other
call. :meth:`Engine.request_ids` and a second :meth:`Engine.pause` may run during a ``wait`` pause.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import anyio

from bus.errors import EngineError, wrong_state
from bus.messages import (
    EngineProperties,
    NackCode,
    PauseMode,
    ProbeResult,
    SleepLevel,
    Target,
)
from bus.operations import Done, Drain, Extend, UpdateOperation
from sidecar._shared_pages.core_status import CoreStatusView
from sidecar._shared_pages.pause_lease import AbandonedPause, LeaseOutcome, PauseLease

if TYPE_CHECKING:
    from collections.abc import Iterator

# Also the types that an engine of one's own gets and returns.
__all__ = [
    "AbandonedPause",
    "CoreStatusView",
    "Engine",
    "EngineInfo",
    "LeaseOutcome",
    "PauseLease",
    "answers_within",
    "require_model",
    "unsupported",
]

# How long a booted engine may take to answer the calls of a starting sidecar.
START_ANSWER_S: Final = 120.0


@contextlib.contextmanager
def answers_within(limit_s: float, who: str) -> Iterator[None]:
    """Limits how long a block of calls may wait for an engine's answers.

    Args:
        limit_s: the limit, in seconds.
        who: the name of the engine, for the error's text.

    Raises:
        EngineError: code ``timeout``: the block has not ended in time.
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


# The hint of a NACK that rejects experts under names that the model doesn't have.
FUSED_HINT = (
    "the checkpoint has one tensor per expert (experts.0.up_proj.weight), transformers fuses them: "
    "send the model itself, its state dict with config=, or the checkpoint's names"
)


class EngineInfo(EngineProperties, frozen=True):
    """Properties of an engine, as its adapter reports them on start.

    Fields that are not named here are as in :class:`bus.messages.EngineProperties`.

    Attributes:
        closed: whether the engine's admission was closed when the adapter started, for whatever
            reason. An earlier sidecar may have closed it, for example for a quarantine.
        booted_closed: whether it was closed because the engine booted so, and no sidecar has ever
            opened it. Then no request has been answered by the weights that it booted with.
        ends_with_sidecar: whether closing the adapter stops the engine.
    """

    closed: bool = False
    booted_closed: bool = False
    ends_with_sidecar: bool = False


@runtime_checkable
class Engine(Protocol):
    """The calls that a sidecar makes on an engine, through the adapter of its kind.

    There are adapters for vLLM's ``AsyncLLM``, for its API server, and for the embedded engine.
    Every method but ``died`` and ``in_flight`` raises :class:`bus.errors.EngineError` if the engine
    rejects the call or fails, and :class:`bus.errors.EngineDead` if the engine is gone.
    """

    async def start(self) -> EngineInfo:
        """Starts the engine, or connects to a running one; returns when it takes requests."""

    async def close(self) -> None:
        """Stops the engine if this adapter has started it; otherwise lets it run on."""

    async def died(self) -> str:
        """Waits until the engine is dead or unreachable for good, and returns the reason."""

    async def in_flight(self) -> int:
        """Returns how many requests the engine has: running, waiting, or frozen by a pause."""

    async def request_ids(self) -> tuple[str, ...]:
        """Returns the ids of all requests, as clients chose them; empty if unknown."""

    def core_view(self) -> CoreStatusView | None:
        """Returns what the core's status page shows now; None without a page. Never blocks."""

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        """Writes how long the engine stays paused without its sidecar. Never blocks.

        If the lease is not renewed in time, the engine reads that on its lease page
        (:mod:`sidecar._shared_pages.pause_lease`), and ends the pause by itself.

        Args:
            lease: the lease of the engine's pause; None if the engine is not paused.

        Returns:
            What the engine has done because this lease was over, which ends the lease for good.
                None if the lease is in force, and always for an engine that needs no lease.
        """

    def abandoned_pause(self) -> AbandonedPause | None:
        """Returns the pause that an earlier sidecar left behind, as found on start; else None."""

    async def version(self) -> int:
        """Returns the weight version that the engine serves; 0 before the first commit."""

    async def join_run(self, run: str) -> None:
        """Salts the caches with a run's id, so that other runs' entries are never found.

        Called after the sidecar has joined a group, before the broker's commands are executed, and
        again when the group's run changes.
        """

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:
        """Stops generation; returns when the engine's device is idle.

        Args:
            mode: ``keep`` freezes requests. ``wait`` lets running requests end, and queues or
                rejects new ones. ``abort`` ends all requests with the tokens they have.
            clear_cache: whether to drop the KV and prefix cache, so that kept requests are
                recomputed after the resume.

        Returns:
            How many requests the engine has then, as :meth:`in_flight` counts them.
        """

    async def resume(self) -> None:
        """Resumes scheduling. Called only after a pause has returned, with all memory allocated."""

    async def sleep(self, level: SleepLevel) -> None:
        """Frees the memory of the KV cache and the weights.

        Called only in a pause that has dropped the KV cache. The call must not wait for other ranks
        of the DP group, because they may reject their sleep.

        Args:
            level: 1 keeps the weights in the host's memory, 2 discards them.
        """

    async def wake_weights(self) -> None:
        """Allocates the weights' memory again. After level 2 its content is undefined."""

    async def wake(self) -> None:
        """Allocates all memory that a sleep has freed, then resumes as :meth:`resume` does."""

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - what admission is
        """Opens or closes admission. The state outlives the sidecar.

        While admission is closed, the engine ends every new request of every client at once and
        without tokens, paused or not. The finish reason is ``abort``. HTTP clients get status 503
        with the reason.

        Args:
            open: True opens admission, False closes it.
        """

    async def abort_requests(self) -> int:
        """Ends every request with the tokens it has, paused or not; returns their number."""

    async def clear_cache(self) -> None:
        """Drops the KV and prefix cache, as a pause with ``clear_cache`` does.

        Called only while the engine is paused, after :meth:`pause` has returned.
        """

    async def perform(self, operation: UpdateOperation) -> Done:
        """Carries out one operation of an update (:mod:`bus.operations`).

        Args:
            operation: the operation. An engine refuses those that it lacks (:func:`unsupported`).

        Returns:
            What the operation's class says.

        Raises:
            EngineError: ``backend_missing`` for a backend that the engine lacks;
                ``transfer_failed``: the sender can't be reached, did not send in time, or sent
                something else. ``manifest_refused``, with ``tensor`` set, for an unknown, missing
                or misshapen tensor, a wrong dtype, half of a fused parameter, or a draft's tensor
                that is shared with the model. ``draft_missing`` if there is no draft model that can
                be updated. ``staging_refused`` if staging is required and impossible.
                ``kv_connector_refused`` if a KV connector would return keys and values of older
                weights. ``checksum_mismatch``, with the first tensor that differs; nothing of the
                chunk is loaded then. ``called_off``: a swap has changed nothing.
        """

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        salt: str,
        *,
        mode: PauseMode,
        clear_cache: bool,
    ) -> tuple[ProbeResult, ...]:
        """Generates tokens for fixed prompts with weights that are loaded and not committed.

        These probes are greedy, and continue past any end of sequence. The engine is paused before
        and after, and serves no other requests meanwhile. All ranks of a DP group are called
        together, and return together.

        Args:
            prompts: the token ids of each probe's prompt.
            max_tokens: how many tokens each probe generates.
            salt: salt of the prefix cache: probes share no cache entry with another salt.
            mode: how the engine was paused, and is again afterwards. If ``EngineInfo.canary`` is
                ``abort``, requests from before the pause have ended, and new ones are ended.
            clear_cache: whether these pauses clear the caches.

        Returns:
            The tokens and log-probabilities of each probe.
        """

    async def commit(self, version: int) -> None:
        """Makes the engine report the loaded weights as ``version`` from now on.

        Args:
            version: the new version. In a catch-up it is the group's version, which may equal the
                served one, or be older if this engine has committed alone.
        """

    async def call_off(self) -> None:
        """Cancels a swap to which not all ranks have agreed, or a staged receive of vLLM's."""


def unsupported(operation: UpdateOperation) -> EngineError:
    """Returns the refusal of an operation that an engine lacks."""
    match operation:
        case Drain(backend=backend):
            text = f"this engine has no {backend} transport that could be drained"
            return EngineError(text, code=NackCode.TRANSFER_FAILED)
        case Extend():
            text = "this engine takes all tensors of an update at once"
            return EngineError(text, code=NackCode.MANIFEST_REFUSED)
        case _:
            text = f"this engine has no operation {type(operation).__name__}"
            return wrong_state(text)


def require_model(target: Target) -> None:
    """Rejects an update of a draft model, for engines without speculative decoding.

    Args:
        target: which model the update is to replace. (Updates of a LoRA adapter have no target.)

    Raises:
        EngineError: code ``draft_missing``: the target is the draft model, also where the update
            would replace both.
    """
    if target != "model":
        raise EngineError("this engine has no draft model", code=NackCode.DRAFT_MISSING)
