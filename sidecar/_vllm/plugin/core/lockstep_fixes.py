"""Fixes three hangs in the pause and resume of vLLM's lockstep cores.

Each was seen to hang real ranks (vLLM 0.32), with vLLM's own coordinator or any other:

* **A second resume.** A rank that is idle and not paused enters the all-reduce of a resume,
  and waits there for ranks that are not in one. With this fix, resuming a rank that is not
  paused changes nothing.
* **A lost START_DP_WAVE.** It arrives at a rank that is still paused, which drops it. A rank
  that was resumed a moment before accepts it, and waits for the other one in its first forward
  pass. With this fix, a paused rank remembers what it dropped, and accepts it after its resume.
  No rank steps alone by that: every rank gets every START, before or after its resume, and no
  resume returns before all ranks were asked to resume. Waves that are over are still dropped.
* **A second pause.** Pausing a group that has agreed on its pause starts another agreement, for
  which all ranks must be asked again. When a `wait` pause becomes a `keep` at its deadline, some
  ranks may know that the `wait` is over and some not. With this fix, a rank of a paused group
  answers a `keep` or `abort` by itself, because there is nothing left to agree on. A `wait`
  still needs an agreement, because frozen requests may have to run to their end.

Each function here wraps the method of its name of vLLM's ``DPEngineCoreProc``, which is
``original``. Disabled with ``WAVEBUS_CORE_GUARD=0``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from bus._vllm.seams import Has, Ref, Says, Seam
from sidecar._vllm.plugin.core.status import is_paused
from sidecar._vllm.plugin.environment import CORE_GUARD
from sidecar._vllm.plugin.vllm_names import LOCKSTEP_CORE, PLAIN_CORE, REQUEST_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("vllm.wavebus")

FIXES: Final = Seam(
    "lockstep pause fixes",
    ("lockstep_pause_fixes",),
    (
        Says(f"{LOCKSTEP_CORE}._handle_client_request", "new_wave, exclude_eng_index = request"),
        Says(
            f"{LOCKSTEP_CORE}._has_global_unfinished_reqs",
            "self.ignore_start_dp_wave = True",
            "self.pending_pause = False",
        ),
        Says(f"{LOCKSTEP_CORE}.resume_scheduler", "ParallelConfig.has_unfinished_dp("),
        Has(REQUEST_TYPES, "START_DP_WAVE"),
    ),
    process="core",
    off=CORE_GUARD,
    sets=(
        (LOCKSTEP_CORE, "wavebus_pending_wave", None),
        (LOCKSTEP_CORE, "wavebus_alone", False),
        (LOCKSTEP_CORE, "wavebus_complete_alone", Ref(f"{PLAIN_CORE}._pause_complete")),
    ),
)


def _has_agreed(core: Any) -> bool:
    """Returns whether this rank has seen that all ranks are paused and idle."""
    return (
        is_paused(core)
        and core.ignore_start_dp_wave
        and not core.pending_pause
        and not core.engines_running
    )


@FIXES.wrap(f"{LOCKSTEP_CORE}.resume_scheduler", "self")
def resume_scheduler(original: Callable[..., Any], core: Any) -> Any:
    """Resumes a paused rank, and starts the wave of a START_DP_WAVE dropped in the pause.

    A rank that is not paused does nothing.
    """
    if not (is_paused(core) or core.pending_pause or core.ignore_start_dp_wave):
        _log.info("wavebus: this rank was asked to resume, but is not paused; nothing changes")
        return None
    pending = core.wavebus_pending_wave
    result = original(core)  # raises while a pause is pending: then the wave stays remembered
    core.wavebus_pending_wave = None
    if pending is not None and pending >= core.current_wave and not core.engines_running:
        core.current_wave = pending
        core.engines_running = True
    return result


@FIXES.wrap(f"{LOCKSTEP_CORE}._handle_client_request", "self, request_type, request")
def handle_client_request(
    original: Callable[..., Any], core: Any, request_type: Any, request: Any
) -> None:
    """Remembers a START_DP_WAVE that the paused rank is about to drop."""
    if request_type.name == "START_DP_WAVE" and core.ignore_start_dp_wave:
        wave, excluded = request
        if excluded != core.engine_index:
            core.wavebus_pending_wave = max(wave, core.wavebus_pending_wave or 0)
    original(core, request_type, request)


@FIXES.wrap(f"{LOCKSTEP_CORE}.pause_scheduler", "self, mode, clear_cache")
def pause_scheduler(
    original: Callable[..., Any], core: Any, mode: str = "abort", clear_cache: bool = True
) -> Any:
    """Lets a rank of a paused DP group answer a further pause by itself."""
    core.wavebus_alone = mode != "wait" and _has_agreed(core)
    try:
        return original(core, mode, clear_cache)
    finally:
        core.wavebus_alone = False


@FIXES.wrap(f"{LOCKSTEP_CORE}._pause_complete", "self")
def pause_complete(original: Callable[..., Any], core: Any) -> Any:
    """Completes a pause without an agreement of the ranks, if they are all paused already."""
    return core.wavebus_complete_alone() if core.wavebus_alone else original(core)
