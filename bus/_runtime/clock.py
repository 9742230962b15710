"""Timers on an asyncio event loop, and one timer for a state machine's deadlines.

The interfaces are in :mod:`bus._runtime.interfaces`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._runtime.interfaces import Handle, Scheduler


class AsyncioScheduler:
    """A scheduler with the running loop's timers and the system's monotonic clock.

    The loop's own clock is too coarse: uvloop's advances once per millisecond, and durations
    on the bus are shorter than that.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = time.monotonic()

    def now_ms(self) -> float:
        """Returns the time since this scheduler was made, in milliseconds."""
        return (time.monotonic() - self._start_s) * 1000.0

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Handle:
        """Calls back at ``when_ms``, or soon after."""
        return self._loop.call_later(max(0.0, when_ms - self.now_ms()) / 1000.0, callback)


class Alarm:
    """A timer that calls back once, at the earliest deadline that was set.

    A later deadline than the one set changes nothing: the callback does what is due, and sets the
    next deadline.
    """

    __slots__ = ("_due_ms", "_ring", "_scheduler", "_timer")

    def __init__(self, scheduler: Scheduler, ring: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._ring = ring
        self._timer: Handle | None = None
        self._due_ms = float("inf")

    def ring_by(self, due_ms: float) -> None:
        """Schedules the callback for ``due_ms`` at the latest."""
        if due_ms >= self._due_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_ms = due_ms
        self._timer = self._scheduler.call_at(due_ms, self._on_timer)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._due_ms = float("inf")

    def _on_timer(self) -> None:
        self._timer = None
        self._due_ms = float("inf")
        self._ring()
