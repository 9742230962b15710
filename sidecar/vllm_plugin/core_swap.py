"""The swap of a staged update inside vLLM's engine cores, between two steps.

A core asks its workers for the swap where it asks them for steps, and they do what they are asked
in that order: so all of them, of tensor and pipeline parallelism, swap between the same two steps,
however many of these are on their way (asynchronous scheduling).

::

    core          event                              next     what happens
    IDLE          SWAP, alone                        IDLE     it swaps; or it is called off, where
                                                              caches are to be cleared and can't
    IDLE          SWAP, in lockstep, and the workers READY    a wave starts, if none runs
                  have all that is to be swapped in
    IDLE          SWAP, in lockstep, paused, or the  IDLE     called off
                  workers have not
    READY         all ranks are, where they confer   IDLE     all swap
    READY         CALL_OFF, or all ranks have paused IDLE     called off
    any           the swap fails half-way, or, where -        the process ends
                  all ranks are at it, at all

**Lockstep.** Ranks add up whether they have work, in one all-reduce at the first step of a wave and
then at every ``dp_sync_interval``-th, which all of them make at the same step. A ready rank adds
:data:`READY` to that number. When all are, all see it there, and swap before the next step. A rank
that is not, for whatever reason, keeps all of them at the old weights. While some are ready the
wave goes on, since the sum is not zero: vLLM's own core adds up the same, and would go on, too.

**Labels.** vLLM labels tokens with the version that the core has when their step is *read*. Steps
that were on their way at the swap are of the version before.

**Prefix cache.** Requests that come after a new version find none of what was computed with older
weights: the salt of their blocks' hashes has the version in it. Requests that were there, and have
not begun, get the new salt. The others go on with what they have; or, if caches are cleared,
compute all anew, and get it as well. So it is with a version that was loaded in a pause, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bus.messages import NackCode
from sidecar.vllm_plugin import core_calls, wire
from sidecar.vllm_plugin.facts import CALL_OFF, PERFORM, SWAP
from sidecar.vllm_plugin.features import swap_gaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("vllm.wavebus")

# What a ready rank adds to how many ranks have work.
READY: Final = 1 << 16
_SALT: Final = "wavebus:"


class SwapRefused(Exception):
    """With a :class:`sidecar.vllm_plugin.wire.Failure` in its text."""

    def __init__(self, why: str) -> None:
        super().__init__(wire.Failure(NackCode.CALLED_OFF, f"the swap was {why}").to_text())


@dataclass(slots=True)
class Swap:
    """What a rank is ready to do, as soon as all are."""

    version: int
    operation: str
    clear_cache: bool
    made: Future[list[bool]]


@dataclass(slots=True)
class _Conference:
    """This process's part in the all-reduce that is under way, and what came of it."""

    ready: bool = False
    all_ready: bool = False


_conference = _Conference()


def install(core: Any) -> bool:
    """Hang it into the cores of the module ``vllm.v1.engine.core``; False if they are not as
    expected."""
    plain, lockstep = core.EngineCoreProc, core.DPEngineCoreProc
    if hasattr(plain, "wavebus_swaps"):
        return True
    gaps = swap_gaps(core)
    if gaps:
        _log.warning("wavebus: updates can't be staged in this vLLM: %s", "; ".join(gaps))
        return False
    core_calls.answer(plain, SWAP, _swap)
    core_calls.answer(plain, CALL_OFF, _call_off)
    plain.preprocess_add_request = _salting(plain.preprocess_add_request)
    core.EngineCore.add_request = _resalting(core.EngineCore.add_request)
    core.EngineCore.set_weight_version = _versioned(core.EngineCore.set_weight_version)
    core.EngineCore._attach_weight_version = _labelled(  # noqa: SLF001 - what there is to wrap
        core.EngineCore._attach_weight_version  # noqa: SLF001
    )
    lockstep._has_global_unfinished_reqs = _conferring(  # noqa: SLF001
        lockstep._has_global_unfinished_reqs  # noqa: SLF001
    )
    core.ParallelConfig.sync_dp_state = staticmethod(_sync_dp_state)
    plain.wavebus_outputs = core.EngineCoreOutputs
    # Class attributes stand for what a core's own has not been set yet.
    plain.wavebus_ready = None
    plain.wavebus_salt = ""
    plain.wavebus_swaps = True
    return True


# -- the swap ----------------------------------------------------------------------------


def _swap(core: Any, version: int, check: str, operation: str, clear_cache: bool) -> Any:
    made: Future[list[bool]] = Future()
    swap = Swap(version, operation, clear_cache, made)
    if not hasattr(core, "current_wave"):
        core.collective_rpc(PERFORM, None, (), {"operation": check})
        _clear_caches(core, swap)
        return _make(core, swap)
    if core.pending_pause or core.ignore_start_dp_wave or int(core.scheduler.pause_state):
        raise SwapRefused("called off: the rank is paused")
    if core.wavebus_ready is not None:
        raise SwapRefused("called off: another one is under way")
    core.collective_rpc(PERFORM, None, (), {"operation": check})
    core.wavebus_ready = swap
    if not core.engines_running:
        core.engines_running = True
        if core.has_coordinator:
            started = core.wavebus_outputs(start_wave=core.current_wave)
            core.output_queue.put_nowait((-1, started))
    return made


def _call_off(core: Any) -> list[bool]:
    swap, core.wavebus_ready = core.wavebus_ready, None
    if swap is not None:
        swap.made.set_exception(SwapRefused("called off"))
    return [swap is not None]


def _make(core: Any, swap: Swap) -> list[bool]:
    """No step is asked of the workers meanwhile. They were checked: if it fails now, some of them,
    or of other ranks, may have swapped."""
    before = core.get_weight_version()
    on_their_way = len(core.batch_queue or ())
    with _or_it_ends():
        core.collective_rpc(PERFORM, None, (), {"operation": swap.operation})
    labels = _labels_of(core)
    since_the_last = on_their_way - sum(count for count, _ in labels)
    if since_the_last:
        labels.append([since_the_last, before])
    core.set_weight_version(str(swap.version))
    if swap.clear_cache:
        _salt_anew(core, begun=True)
    return [False]


def _clear_caches(core: Any, swap: Swap) -> None:
    """All that was computed with the weights before, as vLLM does when a pause is made; nothing is
    computed until they are swapped. But what is remembered of images as they came, stays: front
    ends remember it, too, and send it once."""
    if not swap.clear_cache:
        return
    try:
        cleared = core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except RuntimeError as error:  # keys and values are on their way from another engine
        raise SwapRefused(f"called off: {error}") from error
    if not cleared:
        raise SwapRefused("called off: the KV connector's cache can't be cleared")
    core.reset_encoder_cache()


@contextlib.contextmanager
def _or_it_ends() -> Iterator[None]:
    """Some workers, or other ranks, may serve other weights by now: where this fails, nobody is to
    hear from this core again."""
    try:
        yield
    except Exception as error:
        _log.critical("wavebus: a swap failed half-way; the engine core ends: %s", error)
        os.kill(os.getpid(), signal.SIGKILL)
        raise


def _conferring(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def _has_global_unfinished_reqs(self: Any, local_unfinished: bool) -> Any:
        _conference.ready = self.wavebus_ready is not None
        _conference.all_ready = False
        unfinished = original(self, local_unfinished)
        if _conference.all_ready:
            swap, self.wavebus_ready = self.wavebus_ready, None
            with _or_it_ends():  # the others do it now
                _clear_caches(self, swap)
            swap.made.set_result(_make(self, swap))
        elif self.ignore_start_dp_wave:
            _call_off(self)
        return unfinished

    return _has_global_unfinished_reqs


def _sync_dp_state(dp_group: Any, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
    """``ParallelConfig.sync_dp_state``, and who is ready to swap."""
    import torch  # noqa: PLC0415 - a core has it

    mine = int(has_unfinished) + READY * _conference.ready
    told = torch.tensor([mine, int(pending_pause)], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.SUM, group=dp_group)
    size = dp_group.size()
    unfinished, pauses = (int(each) for each in told.tolist())
    _conference.all_ready = unfinished // READY == size
    work = unfinished % READY if _conference.all_ready else unfinished
    return work > 0 or pauses % size != 0, pauses == size


# -- labels ------------------------------------------------------------------------------


def _labels_of(core: Any) -> deque[list[Any]]:
    labels: deque[list[Any]] | None = getattr(core, "wavebus_labels", None)
    if labels is None:
        labels = core.wavebus_labels = deque()
    return labels


def _labelled(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def _attach_weight_version(self: Any, outputs: Any) -> None:
        labels = _labels_of(self)
        if not labels:
            original(self, outputs)
            return
        for output in outputs.values():
            output.weight_version = labels[0][1]
        labels[0][0] -= 1
        if not labels[0][0]:
            labels.popleft()

    return _attach_weight_version


# -- prefix caches -----------------------------------------------------------------------


def _versioned(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def set_weight_version(self: Any, weight_version: str) -> None:
        changed = weight_version != self.get_weight_version()
        original(self, weight_version)
        if changed:
            self.wavebus_salt = f"{_SALT}{weight_version}:"
            _salt_anew(self, begun=False)

    return set_weight_version


def _salting(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        own, salt = request.cache_salt, self.wavebus_salt
        if salt:
            request.cache_salt = salt + (own or "")
        made, wave = original(self, request)
        made.wavebus_own_salt, made.wavebus_salt = own, salt
        return made, wave

    return preprocess_add_request


def _resalting(original: Callable[..., Any]) -> Any:
    """A request may have been made before a new version, and come behind it."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, request_wave: int = 0) -> Any:
        _salt(self, request)
        return original(self, request, request_wave)

    return add_request


def _salt_anew(core: Any, *, begun: bool) -> None:
    for request in core.scheduler.requests.values():
        if begun or not (request.num_computed_tokens or request.num_output_tokens):
            _salt(core, request)


def _salt(core: Any, request: Any) -> None:
    if getattr(request, "wavebus_salt", None) in (None, core.wavebus_salt):
        return
    request.wavebus_salt = core.wavebus_salt
    request.cache_salt = core.wavebus_salt + (request.wavebus_own_salt or "")
    request.block_hashes.clear()
    request.update_block_hashes()
