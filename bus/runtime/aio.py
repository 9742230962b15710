"""Time on an asyncio event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.runtime.base import Handle


class AsyncioScheduler:
    """The running loop's clock and timers."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()

    def now_ms(self) -> float:
        return (self._loop.time() - self._start_s) * 1000.0

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Handle:
        return self._loop.call_at(self._start_s + when_ms / 1000.0, callback)
