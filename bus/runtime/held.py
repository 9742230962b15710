"""Files and folders that are known to be left: their maker has no lock on them any more.

Whoever makes one takes an advisory lock (``flock``) on it, which ends with its process, however
that ends.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


def sweep(paths: Iterable[Path], remove: Callable[[Path], None]) -> list[str]:
    """Remove those that were left; return their names. Another user's are none of ours."""
    removed: list[str] = []
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # not ours, or gone meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
            removed.append(path.name)
        except BlockingIOError:
            pass  # its maker lives
        finally:
            os.close(descriptor)
    return removed
