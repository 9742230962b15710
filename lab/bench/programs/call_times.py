"""Records when calls run, for programs whose calls a bench sums up."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

# A call's name, begin and end, in seconds on the clock that all processes of a host share
# (`time.monotonic()`).
Call: TypeAlias = "tuple[str, float, float]"


class CallTimes:
    """Records the name, begin and end of calls, until :meth:`take` returns them."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Records the block as a call."""
        since_s = time.monotonic()
        try:
            yield
        finally:
            self._calls.append((name, since_s, time.monotonic()))

    def take(self) -> list[Call]:
        """Returns the calls since this method was last called."""
        calls, self._calls = self._calls, []
        return calls
