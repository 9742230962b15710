"""One timer for all deadlines of a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.runtime.base import Handle, Scheduler


class Alarm:
    """Rings at the earliest deadline that was set, once; then it is to be set anew.

    A deadline that is later than the one set changes nothing: whoever is rung looks at
    what is due, and sets the next.
    """

    __slots__ = ("_due_ms", "_ring", "_scheduler", "_timer")

    def __init__(self, scheduler: Scheduler, ring: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._ring = ring
        self._timer: Handle | None = None
        self._due_ms = float("inf")

    def by(self, due_ms: float) -> None:
        """Ring at ``due_ms`` (of the scheduler's clock), or earlier if that is set."""
        if due_ms >= self._due_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_ms = due_ms
        self._timer = self._scheduler.call_at(due_ms, self._rings)

    def cancel(self) -> None:
        """Ring no more, unless it is set again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._due_ms = float("inf")

    def _rings(self) -> None:
        self._timer = None
        self._due_ms = float("inf")
        self._ring()
