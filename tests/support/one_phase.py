"""Ranks that pause in one phase, as engines did before pauses had two. That is wrong.

Such a pause is acknowledged at once, whatever the core is doing. The rank makes no more steps, and
ignores START_DP_WAVE. If another rank is in a step, that rank blocks there for ever.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sidecar._embedded.parallel import rank
from sidecar._embedded.parallel.core import LockstepCore

if TYPE_CHECKING:
    from bus.messages import PauseMode


def pause_in_one_phase() -> None:
    """In the process of an embedded rank, before it is made."""
    made_by: Any = rank
    made_by.LockstepCore = OnePhaseCore


class OnePhaseCore(LockstepCore):
    """Pauses in one phase, as engines did before pauses had two."""

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Pauses, and acknowledges at once."""
        super().pause(mode, clear_cache=clear_cache)
        at_once: Future[None] = Future()
        at_once.set_result(None)
        return at_once

    def resume(self) -> None:
        """Resumes without the other ranks."""
        self.require_paused("resume")
        self._mode = None
        self._waves.on_resumed(unfinished=False)

    def _on_pause_requested(self) -> None:
        self._waves.paused = self._waves.agreed = True
        self._waves.running = False
        self._note("locally_paused", mode=self._mode)

    def _has_step(self) -> bool:
        return not self._waves.paused and super()._has_step()
