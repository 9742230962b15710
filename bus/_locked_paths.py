"""Removes files and folders that dead processes have left behind.

A process holds an advisory lock (``flock``) on each file or folder that it makes, and the kernel
releases the lock when the process ends. So a path without a lock is left over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The prefix of the names of all files that wavebus makes on tmpfs.
SHM_PREFIX: Final = "wavebus-"
# Follows no link, and does not wait at a pipe.
_PROBE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def sweep(paths: Iterable[Path], remove: Callable[[Path], None]) -> list[str]:
    """Removes this user's paths that no process has locked, and returns their names.

    Paths of other users, and those that can't be removed, are skipped: anybody may make files with
    these names in a shared folder.

    Args:
        paths: files or folders, each made by a process that locks it.
        remove: removes one path.
    """
    removed: list[str] = []
    for path in paths:
        try:
            descriptor = os.open(path, _PROBE)
        except OSError:
            continue  # a link, already removed, or not readable
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
                removed.append(path.name)
        except OSError:
            pass  # the process that made it is alive, or it can't be removed
        finally:
            os.close(descriptor)
    return removed


class LockedFolder:
    """A new folder that this process locks, and removes on :meth:`close`.

    If the process is killed, the folder remains until a process makes one with the same prefix.

    Args:
        prefix: the beginning of the folder's name; the process id follows.
    """

    def __init__(self, prefix: str, parent: Path) -> None:
        sweep(parent.glob(f"{prefix}*/"), lambda left: shutil.rmtree(left, ignore_errors=True))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another process removed it before it was locked
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.is_dir():
                break
            os.close(self._lock)

    def close(self) -> None:
        """Removes the folder; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
