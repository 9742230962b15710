"""Simulated time: a scheduler whose clock moves only when a test moves it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(order=True)
class _Timer:
    when_ms: float
    order: int
    callback: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class SimScheduler:
    """Implements :class:`bus._runtime.interfaces.Scheduler` with simulated time.

    Timers of the same time run in the order in which they were set.
    """

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._timers: list[_Timer] = []
        self._count = 0

    def now_ms(self) -> float:
        """Returns the simulated time in milliseconds."""
        return self._now_ms

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> _Timer:
        """Calls back at ``when_ms`` of simulated time."""
        self._count += 1
        timer = _Timer(max(when_ms, self._now_ms), self._count, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def step(self) -> bool:
        """Runs the next timer; returns False if there is none."""
        while self._timers:
            timer = heapq.heappop(self._timers)
            if timer.cancelled:
                continue
            self._now_ms = timer.when_ms
            timer.callback()
            return True
        return False

    def run_for(self, duration_ms: float) -> None:
        """Advances the time by ``duration_ms``, and runs all timers that become due."""
        until_ms = self._now_ms + duration_ms
        while self._due_by(until_ms):
            self.step()
        self._now_ms = until_ms

    def run_until(self, condition: Callable[[], bool], *, within_ms: float) -> bool:
        """Runs timers until the condition holds.

        Returns:
            Whether it holds within ``within_ms`` of simulated time.
        """
        until_ms = self._now_ms + within_ms
        while not condition():
            if not self._due_by(until_ms):
                self._now_ms = until_ms
                return condition()
            self.step()
        return True

    def _due_by(self, until_ms: float) -> bool:
        """Returns whether a timer is due, and drops cancelled ones."""
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        return bool(self._timers) and self._timers[0].when_ms <= until_ms
