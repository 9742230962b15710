"""Time on an asyncio event loop."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.runtime.base import Handle


class AsyncioScheduler:
    """The running loop's timers, and the system's monotonic clock.

    Not the loop's own clock: uvloop's stands still for a whole millisecond, and durations
    on the bus are shorter than that.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = time.monotonic()

    def now_ms(self) -> float:
        return (time.monotonic() - self._start_s) * 1000.0

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Handle:
        return self._loop.call_later(max(0.0, when_ms - self.now_ms()) / 1000.0, callback)
