"""Three holes in the pause and resume of vLLM's lockstep cores, closed from inside.

Each was seen to hang real ranks (vLLM 0.32), with vLLM's own coordinator or any other:

* **A second resume** of a rank that is idle and not paused waits in the all-reduce of a
  resume for ranks that are not in one. Here a resume of a rank that is not paused changes
  nothing.
* **A lost wake**: START_DP_WAVE comes to a rank that is still paused, which drops it,
  while a rank that was resumed a moment before obeys it and waits for the other in its
  first forward pass. Here a paused rank remembers what it dropped, and obeys it after its
  resume. No rank steps alone by that: every rank gets every START, either before its
  resume or after it, and no resume returns before all ranks were asked for one. Numbers of
  waves that are over are dropped as ever.
* **A second pause** of a group that has agreed on its pause makes another wave, for which
  all ranks must be asked again. When a `wait` pause is to become a `keep` at its deadline,
  some ranks may have heard that it is over and some not. Here a rank of a paused group
  answers a `keep` or `abort` by itself: there is nothing left to agree upon. Not a `wait`:
  it may have frozen requests to run to their end.

Off with ``WAVEBUS_CORE_GUARD=0``.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from sidecar.vllm_plugin import environment
from sidecar.vllm_plugin.features import guard_gaps

_log = logging.getLogger("vllm.wavebus")


def install(core: Any) -> bool:
    """Guard ``DPEngineCoreProc`` of the module ``vllm.v1.engine.core``; False if it is not
    as expected, or the guard is off."""
    lockstep = core.DPEngineCoreProc
    if hasattr(lockstep, "wavebus_guard"):
        return True
    if os.environ.get(environment.CORE_GUARD) == "0":
        return False
    gaps = guard_gaps(core)
    if gaps:
        _log.warning("wavebus: no guard in this vLLM's engine cores: %s", "; ".join(gaps))
        return False
    lockstep.resume_scheduler = _guarded_resume(lockstep.resume_scheduler)
    lockstep._handle_client_request = _remembering(  # noqa: SLF001 - what there is to wrap
        lockstep._handle_client_request,  # noqa: SLF001
        core.EngineCoreRequestType.START_DP_WAVE,
    )
    lockstep.pause_scheduler = _guarded_pause(lockstep.pause_scheduler)
    lockstep._pause_complete = _completed_alone(  # noqa: SLF001
        lockstep._pause_complete,  # noqa: SLF001
        core.EngineCoreProc._pause_complete,  # noqa: SLF001
    )
    # Class attributes stand for what an engine's own has not been set yet.
    lockstep.wavebus_owed_wave = None
    lockstep.wavebus_alone = False
    lockstep.wavebus_guard = True
    return True


def _paused(core: Any) -> bool:
    return int(core.scheduler.pause_state) != 0


def _agreed(core: Any) -> bool:
    """All ranks are paused, idle, and not resumed since (as far as this one knows)."""
    return (
        _paused(core)
        and core.ignore_start_dp_wave
        and not core.pending_pause
        and not core.engines_running
    )


def _guarded_resume(original: Any) -> Any:
    @functools.wraps(original)
    def resume_scheduler(self: Any) -> Any:
        if not (_paused(self) or self.pending_pause or self.ignore_start_dp_wave):
            _log.info("wavebus: a resume of a rank that is not paused; nothing is changed")
            return None
        owed = self.wavebus_owed_wave
        result = original(self)  # raises while a pause is pending: then it is owed on
        self.wavebus_owed_wave = None
        if owed is not None and owed >= self.current_wave and not self.engines_running:
            self.current_wave = owed
            self.engines_running = True
        return result

    return resume_scheduler


def _remembering(original: Any, start_dp_wave: Any) -> Any:
    @functools.wraps(original)
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if request_type == start_dp_wave and self.ignore_start_dp_wave:
            wave, excluded = request
            if excluded != self.engine_index:
                self.wavebus_owed_wave = max(wave, self.wavebus_owed_wave or 0)
        original(self, request_type, request)

    return _handle_client_request


def _guarded_pause(original: Any) -> Any:
    @functools.wraps(original)
    def pause_scheduler(self: Any, mode: str = "abort", clear_cache: bool = True) -> Any:
        self.wavebus_alone = mode != "wait" and _agreed(self)
        try:
            return original(self, mode, clear_cache)
        finally:
            self.wavebus_alone = False

    return pause_scheduler


def _completed_alone(original: Any, plain: Any) -> Any:
    @functools.wraps(original)
    def _pause_complete(self: Any) -> Any:
        return plain(self) if self.wavebus_alone else original(self)

    return _pause_complete
