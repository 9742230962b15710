"""What tests of interrupts ask of a thread."""

from __future__ import annotations

import concurrent.futures
import linecache
import sys
import traceback
from pathlib import Path

_FUTURES = str(Path(concurrent.futures.__file__).parent)


def waits_for_a_lock(thread: int) -> bool:
    """Whether a thread waits for a lock. Before that, a main thread would handle a signal at its
    next step."""
    frame = sys._current_frames()[thread]
    return "waiter.acquire(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def waits_for_a_future(thread: int) -> bool:
    """Whether it waits for the lock of a future, and not for one that is soon free."""
    frames = traceback.extract_stack(sys._current_frames()[thread])
    return waits_for_a_lock(thread) and any(
        each.filename.startswith(_FUTURES) and each.name in ("wait", "result") for each in frames
    )
