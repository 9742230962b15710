"""How not to pause: in one phase. For tests alone, which show the deadlock that follows.

The pause is acknowledged at once, whatever the core is doing. A rank that has heard of it
steps no more, for nobody, and a START_DP_WAVE that comes then is not heeded. If another
rank is in a step, it waits there for ever, and with it whatever was asked of it meanwhile.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from sidecar.embedded.parallel.core import LockstepCore

if TYPE_CHECKING:
    from bus.messages import PauseMode


class OnePhaseCore(LockstepCore):
    """As engines were before pauses had two phases."""

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        super().pause(mode, clear_cache=clear_cache)
        at_once: Future[None] = Future()
        at_once.set_result(None)
        return at_once

    def resume(self) -> None:
        self.require_paused("resume")
        self._mode = None
        self._waves.resumed(unfinished=False)

    def _pause_asked(self) -> None:
        self._waves.paused = self._waves.agreed = True
        self._waves.running = False
        self._note("locally_paused", mode=self._mode)

    def _busy(self) -> bool:
        return not self._waves.paused and super()._busy()
