"""Swaps in a staged update inside vLLM's engine core, between two steps.

A core calls its workers for a swap as it calls them for steps, and they execute calls in order. So
all workers (tensor and pipeline parallelism) swap between the same two steps, however many steps
are in flight (asynchronous scheduling).

::

    core          event                              next     what happens
    IDLE          SWAP, not in lockstep              IDLE     swaps; called off if caches must be
                                                              cleared and can't be
    IDLE          SWAP, in lockstep                  READY    a wave starts, if none runs
    IDLE          SWAP, in lockstep, paused          IDLE     called off
    READY         an all-reduce: all ranks are ready CHECKED  the workers check, the caches are
                                                              cleared if asked
    READY         CALL_OFF, or all ranks have paused IDLE     called off
    CHECKED       an all-reduce: all have succeeded  IDLE     all ranks swap
    CHECKED       an all-reduce: some have not       IDLE     called off in all ranks
    any           a swap fails half-way; or fails    -        the process ends
                  in a rank when all ranks swap

**Lockstep.** Ranks sum up whether they have work, in one all-reduce at the first step of a wave and
at every ``dp_sync_interval``-th step, which is the same step in all ranks. A ready rank adds
:data:`READY` to its number. When all ranks are ready, all see it in the same sum. Before the next
step their workers check that they can swap, and a second all-reduce says whether all can. One rank
that is not ready keeps all of them at the old weights. While some ranks are ready the sum is not
zero, so the wave continues, also in vLLM's own code, which adds up the same.

**Soon.** A rank in which a staged update is under way adds :data:`SOON`. While all ranks add SOON,
they sum up at every step. Otherwise a COMMIT would wait for up to ``dp_sync_interval`` steps.

**Version labels.** vLLM labels tokens with the version that the core has when it *reads* a step's
output. Steps that were in flight at the swap must be labelled with the version before.

:mod:`sidecar._vllm.plugin.core.kv_versions` handles keys and values. Functions with a parameter
``original`` wrap the method of their name of vLLM's engine core, or replace ``sync_dp_state``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable  # noqa: TC003 - the conference's default is one
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bus import operations as ops
from bus._vllm.seams import Form, Ref, Says, Seam, Takes
from bus.messages import NackCode
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.core import kv_versions
from sidecar._vllm.plugin.core.adapters import perform
from sidecar._vllm.plugin.core.status import is_paused
from sidecar._vllm.plugin.vllm_names import (
    BASE_CORE,
    CLEARS_PREFIXES,
    CORE_MODULE,
    LOCKSTEP_CORE,
    PARALLEL_CONFIG,
    PLAIN_CORE,
    START_WAVE,
    TAKES_RPC,
    TELLS_VERSION,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_log = logging.getLogger("vllm.wavebus")

# To the number of ranks that have work (at most 1,023), a ready rank adds READY, and one that
# expects a swap adds SOON. The sum stays below 1 << 31.
READY: Final = 1 << 10
SOON: Final = 1 << 20
# A rank expects a swap for this long, in seconds. It ends what a dead sidecar began.
_SOON_S: Final = 60.0

_SYNC: Final = f"{PARALLEL_CONFIG}.sync_dp_state"
_BATCHES: Final = Says(f"{BASE_CORE}.step_with_batch_queue", "batch_queue.appendleft(")
LABELS: Final = Seam(
    "version labels",
    ("version_labels",),
    (TELLS_VERSION, _BATCHES),
    process="core",
    sets=((BASE_CORE, "wavebus_labels_steps", True),),
)
SWAP: Final = Seam(
    "swap",
    ("staged_updates", "lockstep_staged_updates"),
    (
        TAKES_RPC,
        CLEARS_PREFIXES,
        Takes(f"{PLAIN_CORE}.reset_encoder_cache", "self"),
        Takes(f"{BASE_CORE}.set_weight_version", "self, weight_version"),
        TELLS_VERSION,
        Says(f"{PLAIN_CORE}._invoke_utility_method", "isinstance(result, Future)"),
        _BATCHES,
    ),
    process="core",
    sets=((PLAIN_CORE, "wavebus_ready", None), (PLAIN_CORE, "wavebus_soon_until_s", 0.0)),
)
_SUM_BY_TORCH: Final = Form("torch adds up", (Says(_SYNC, "distributed.all_reduce(tensor"),))
_SUM_BY_VLLM: Final = Form(
    "vLLM adds up",
    (
        Says(_SYNC, "cpu_all_reduce_(tensor, dp_group, timeout="),
        Takes("vllm.distributed.utils:cpu_all_reduce_", "tensor, group, timeout"),
    ),
)
LOCKSTEP_SWAP: Final = Seam(
    "lockstep swap",
    ("lockstep_staged_updates",),
    (
        Says(
            _SYNC,
            "[int(has_unfinished), int(pending_pause)], dtype=torch.int32",
            "tensor[0].item() > 0 or pause_count % dp_size != 0",
            "return (has_unfinished_global, pause_count == dp_size)",
        ),
        Says(f"{LOCKSTEP_CORE}.run_busy_loop", START_WAVE, "self.step_counter = 0"),
        Says(
            f"{LOCKSTEP_CORE}._has_global_unfinished_reqs",
            "self.step_counter % self.dp_sync_interval != 0",
        ),
    ),
    forms=(_SUM_BY_TORCH, _SUM_BY_VLLM),
    process="core",
    needs=("swap",),
    sets=(
        (LOCKSTEP_CORE, "wavebus_swaps_together", True),
        (LOCKSTEP_CORE, "wavebus_outputs", Ref(f"{CORE_MODULE}:EngineCoreOutputs")),
    ),
)


class SwapRefused(Exception):
    """A swap of the weights was called off, and nothing has changed.

    The exception's text contains a ``WorkerFailure``, because vLLM passes only texts on to the
    sidecar.
    """

    def __init__(self, why: str) -> None:
        super().__init__(
            operations.WorkerFailure(NackCode.CALLED_OFF, f"the swap was {why}").to_text()
        )


@dataclass(slots=True)
class ReadySwap:
    """A swap that waits in one lockstep rank until all ranks are ready.

    Attributes:
        operation: the swap.
        made: a future of the swap's result; raises :class:`SwapRefused` if the swap is called off.
        asked_s: when the swap was asked for, in seconds of ``time.monotonic()``.
    """

    operation: ops.SwapStaged
    made: Future[list[bool]]
    asked_s: float = field(default_factory=time.monotonic)


@dataclass
class _Conference:
    """The current all-reduce of the ranks: this rank's contribution, and the result.

    Attributes:
        ready: whether this rank is ready to swap.
        soon: whether this rank expects a swap.
        all_ready: whether all ranks are ready.
        all_soon: whether all ranks expect a swap. None: no all-reduce was due.
        all_succeed: makes another all-reduce; returns whether all ranks have passed True.
    """

    ready: bool = False
    soon: bool = False
    all_ready: bool = False
    all_soon: bool | None = None
    all_succeed: Callable[[bool], bool] = bool

    def begin(self, *, ready: bool, soon: bool) -> None:
        """Sets this rank's contribution, before an all-reduce that may be due."""
        self.ready, self.soon = ready, soon
        self.all_ready, self.all_soon = False, None


_conference = _Conference()


# -- the swap ----------------------------------------------------------------------------


@SWAP.answer("wavebus_swap")
def swap(core: Any, operation: str) -> Any:
    """Swaps to the staged weights now or, in lockstep, when all ranks are ready.

    The core answers :data:`sidecar._vllm.plugin.worker_rpc.SWAP` with this function.

    Args:
        core: the engine core.
        operation: the encoded :class:`ops.SwapStaged`, which the workers get, too.

    Returns:
        ``[False]``: the swap was not called off. In lockstep, a future of that list.

    Raises:
        SwapRefused: the swap is impossible now, and nothing has changed.
    """
    made: Future[list[bool]] = Future()
    decoded = operations.decode(operation)
    assert isinstance(decoded, ops.SwapStaged)
    asked = ReadySwap(decoded, made)
    if not hasattr(core, "current_wave"):
        perform(core, operations.CheckReady())
        _clear_caches(core, asked)
        return _swap_now(core, asked)
    if not hasattr(core, "wavebus_swaps_together"):
        raise SwapRefused("called off: ranks in lockstep can't agree on a step in this vLLM")
    if core.pending_pause or core.ignore_start_dp_wave or is_paused(core):
        raise SwapRefused("called off: the rank is paused")
    if core.wavebus_ready is not None:
        raise SwapRefused("called off: another swap is under way")
    core.wavebus_ready = asked
    if not core.engines_running:
        core.engines_running = True
        if core.has_coordinator:
            started = core.wavebus_outputs(start_wave=core.current_wave)
            core.output_queue.put_nowait((-1, started))
    return made


@SWAP.answer("wavebus_expect_swap")
def expect_swap(core: Any, expected: bool) -> list[bool]:
    """Records whether a swap is expected soon; then ranks in lockstep agree at each step.

    The core answers :data:`sidecar._vllm.plugin.worker_rpc.EXPECT_SWAP` with this function.

    Args:
        core: the engine core.
        expected: whether a staged update is under way.

    Returns:
        ``[True]`` in lockstep, else ``[False]``.
    """
    core.wavebus_soon_until_s = time.monotonic() + _SOON_S if expected else 0.0
    return [hasattr(core, "current_wave")]


@SWAP.answer("wavebus_call_off")
def call_off(core: Any) -> list[bool]:
    """Cancels a swap that waits for other ranks.

    The core answers :data:`sidecar._vllm.plugin.worker_rpc.CALL_OFF` with this function.

    Returns:
        ``[True]`` if a swap was waiting, else ``[False]``.
    """
    waiting, core.wavebus_ready = core.wavebus_ready, None
    if waiting is not None:
        waiting.made.set_exception(SwapRefused("called off"))
    return [waiting is not None]


def _swap_now(core: Any, swap: ReadySwap) -> list[bool]:
    """Swaps; no further step is sent to the workers meanwhile.

    The workers were checked before. If the swap fails now, some workers or other ranks may have
    swapped.
    """
    begun_s, before = time.monotonic(), core.get_weight_version()
    on_their_way = len(core.batch_queue or ())
    with _exit_on_failure():
        perform(core, swap.operation)
    if hasattr(core, "wavebus_labels_steps"):
        labels = _labels_of(core)
        since_the_last = on_their_way - sum(count for count, _ in labels)
        if since_the_last:
            labels.append([since_the_last, before])
    core.wavebus_keeps_kv = not swap.operation.clear_cache
    core.set_weight_version(str(swap.operation.version))
    _log.debug(
        "wavebus: swapped to version %s in %.1f ms, %.1f ms after it was asked for",
        swap.operation.version,
        (time.monotonic() - begun_s) * 1000,
        (begun_s - swap.asked_s) * 1000,
    )
    return [False]


def _clear_caches(core: Any, swap: ReadySwap) -> None:
    """Drops caches of the old weights, if asked; no step runs before the swap."""
    if not swap.operation.clear_cache:
        return
    try:
        kv_versions.clear(core)
    except RuntimeError as error:
        raise SwapRefused(f"called off: {error}") from error


@contextlib.contextmanager
def _exit_on_failure() -> Iterator[None]:
    """Ends the process if the block fails.

    Some workers or ranks may then serve other weights, so this core must not be used again.
    """
    try:
        yield
    except Exception as error:
        _log.critical("wavebus: a swap failed half-way; the engine core ends: %s", error)
        os.kill(os.getpid(), signal.SIGKILL)
        raise


@LOCKSTEP_SWAP.wrap(f"{LOCKSTEP_CORE}._has_global_unfinished_reqs", "self, local_unfinished")
def has_global_unfinished_reqs(
    original: Callable[..., Any], core: Any, local_unfinished: bool
) -> Any:
    """Swaps if all ranks have reported in this step's all-reduce that they are ready.

    ``original`` makes the all-reduce, if one is due.
    """
    soon = time.monotonic() < core.wavebus_soon_until_s
    _conference.begin(ready=core.wavebus_ready is not None, soon=soon)
    unfinished = original(core, local_unfinished)
    if _conference.all_soon is not None:
        usual = core.vllm_config.parallel_config.dp_sync_interval
        core.dp_sync_interval = 1 if _conference.all_soon else usual
    if _conference.all_ready:
        _swap_together(core)
    elif core.ignore_start_dp_wave:
        call_off(core)
    return unfinished


def _swap_together(core: Any) -> None:
    """Swaps or cancels in all ranks, which are all before the same step."""
    ready, core.wavebus_ready = core.wavebus_ready, None
    core.wavebus_soon_until_s = 0.0
    problem: Exception | None = None
    try:
        perform(core, operations.CheckReady())
        _clear_caches(core, ready)
    except Exception as error:  # noqa: BLE001 - the other ranks must not be left in the all-reduce
        problem = error
    if _conference.all_succeed(problem is None):
        ready.made.set_result(_swap_now(core, ready))
    else:
        ready.made.set_exception(problem or SwapRefused("called off: another rank can't swap"))


@_SUM_BY_TORCH.wrap(_SYNC, "dp_group, has_unfinished, pending_pause")
def sum_by_torch(
    _original: Callable[..., Any], dp_group: Any, has_unfinished: bool, pending_pause: bool
) -> tuple[bool, bool]:
    """Makes the ranks' all-reduce with torch, and adds the number of ready ranks to it.

    Replaces vLLM's static method ``ParallelConfig.sync_dp_state``, with its parameters and results.
    """
    import torch  # noqa: PLC0415 - a core has it

    def add_up(votes: torch.Tensor) -> None:
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.SUM, group=dp_group)

    return _vote(add_up, dp_group.size(), has_unfinished, pending_pause)


@_SUM_BY_VLLM.wrap(_SYNC, "self, dp_group, has_unfinished, pending_pause")
def sum_by_vllm(
    _original: Callable[..., Any],
    config: Any,
    dp_group: Any,
    has_unfinished: bool,
    pending_pause: bool,
) -> tuple[bool, bool]:
    """Makes the ranks' all-reduce with vLLM's function, and adds the number of ready ranks.

    Replaces vLLM's method ``ParallelConfig.sync_dp_state``, with its parameters and results, where
    vLLM uses an all-reduce of its own, with a time limit. All ranks must use the same kind of
    all-reduce, or they hang.
    """
    from vllm.distributed.utils import cpu_all_reduce_  # noqa: PLC0415 - only inside a core

    def add_up(votes: torch.Tensor) -> None:
        cpu_all_reduce_(votes, dp_group, timeout=config.cpu_distributed_timeout)

    return _vote(add_up, dp_group.size(), has_unfinished, pending_pause)


def _vote(
    add_up: Callable[[torch.Tensor], None], size: int, has_unfinished: bool, pending_pause: bool
) -> tuple[bool, bool]:
    import torch  # noqa: PLC0415 - a core has it

    def total(number: int, pause: bool = False) -> tuple[int, int]:
        votes = torch.tensor([number, int(pause)], dtype=torch.int32, device="cpu")
        add_up(votes)
        numbers, pauses = (int(each) for each in votes.tolist())
        return numbers, pauses

    mine = int(has_unfinished) + READY * _conference.ready + SOON * _conference.soon
    numbers, pauses = total(mine, pending_pause)
    soon, numbers = divmod(numbers, SOON)
    ready, unfinished = divmod(numbers, READY)
    _conference.all_soon, _conference.all_ready = soon == size, ready == size
    _conference.all_succeed = lambda succeeds: total(int(succeeds))[0] == size
    waiting = ready % size + soon % size
    return unfinished + waiting > 0 or pauses % size != 0, pauses == size


# -- labels ------------------------------------------------------------------------------


def _labels_of(core: Any) -> deque[list[Any]]:
    labels: deque[list[Any]] | None = getattr(core, "wavebus_labels", None)
    if labels is None:
        labels = core.wavebus_labels = deque()
    return labels


@LABELS.wrap(f"{BASE_CORE}._attach_weight_version", "self, outputs")
def attach_weight_version(original: Callable[..., Any], core: Any, outputs: Any) -> None:
    """Labels outputs of a step that began before a swap with the old version."""
    labels = _labels_of(core)
    if not labels:
        original(core, outputs)
        return
    for output in outputs.values():
        output.weight_version = labels[0][1]
    labels[0][0] -= 1
    if not labels[0][0]:
        labels.popleft()
