"""Writes the journal to disk, in files of bounded size, and deletes the oldest ones.

Records stay in a buffer for some milliseconds, then go to the operating system in one call. If the
broker is killed, only the buffer is lost. A caller that must not lose a record calls
:meth:`JournalWriter.flush`.

If a write fails, the file ends with the last buffer that was written completely. The writer then
tries once a second to begin another file, whose first records say how many records were lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from bus._journal.records import (
    MAGIC,
    SUFFIX,
    BrokerClosed,
    FileBegan,
    FrameReceived,
    FrameRefused,
    FrameSent,
    KeysChanged,
    RecordsLost,
    TimerFired,
    pack,
)
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from bus._protocol.core.access import KeyRole
    from bus._protocol.core.config import BrokerConfig
    from bus._runtime.interfaces import Handle, Scheduler

DEFAULT_BYTES: Final = 64 * 1024 * 1024
LEAST_BYTES: Final = 64 * 1024
MOST_BYTES: Final = 4 * 1024 * 1024 * 1024
FILES: Final = 4
_MOST_FILES: Final = 64  # files of many short lives
_FLUSH_MS: Final = 5.0
_FLUSH_BYTES: Final = 256 * 1024
_RETRY_MS: Final = 1000.0


class JournalWriter:
    """Writes a broker's journal: all frames that it receives and sends, for a later replay.

    Implements :class:`bus._runtime.interfaces.Journal`. All files in the folder, also those of
    earlier lives of the broker, together take at most ``limit_bytes``. They take more only if one
    frame, or twice the list of authorised keys, is larger.

    Args:
        folder: the folder, made if it does not exist. Only one broker at a time may write in it.
        limit_bytes: the most bytes of all files; each file takes a quarter.
        boot: the random number of this life of the broker.
        config: the broker's configuration, which a replay needs.
        keys: the authorised public keys with their roles, which a replay needs; None: no keys.
        scheduler: the broker's clock, and the timer that writes the buffer after 5 ms.
        on_failure: called when writing begins to fail. Records are lost from then on.
        on_recovery: called when writing works again, with the number of lost records.

    Raises:
        UsageError: the folder can't be made or written, or another broker writes in it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        boot: int,
        config: BrokerConfig,
        keys: Mapping[str, KeyRole] | None = None,
        scheduler: Scheduler,
        on_failure: Callable[[OSError], None],
        on_recovery: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._file_limit = limit_bytes // FILES
        self._boot = boot
        self._config = config
        self._keys = keys
        self._software = version("wavebus")
        self._scheduler = scheduler
        self._on_failure = on_failure
        self._on_recovery = on_recovery
        self._buffer = bytearray()
        self._timer: Handle | None = None
        self._file: int | None = None  # the file's descriptor
        self._size = 0  # of the file, with what is buffered
        self._files = 0
        self._records = 0
        self._written_bytes = 0  # of the file
        self._buffered = 0  # records
        self._lost = 0  # since writing began to fail
        self._retry: Handle | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._kept = [(path, path.stat().st_size) for path in journal_files(folder)]
                self._open()
            except BaseException:
                os.close(self._lock)
                raise
        except BlockingIOError:
            raise UsageError(
                f"--journal={folder}: another broker writes its journal there; give each its own"
            ) from None
        except OSError as error:
            raise UsageError(f"--journal={folder}: {error.strerror}") from error

    # -- what is recorded -----------------------------------------------------

    def on_received(self, now_ms: float, route: bytes, frame: bytes, user: str) -> None:
        """Records a received frame; ``user`` is the public key of its connection, or empty."""
        self._append(pack(FrameReceived(now_ms, route, frame, user)))

    def on_refused(self, now_ms: float, route: bytes, size_bytes: int) -> None:
        """Records that a frame from ``route`` was refused unread."""
        self._append(pack(FrameRefused(now_ms, route, size_bytes)))

    def on_keys_changed(self, now_ms: float, keys: Mapping[str, KeyRole]) -> None:
        """Records that these keys (roles by public key) replaced the authorised keys."""
        self._append(pack(KeysChanged(now_ms, dict(keys))))
        self._keys = keys

    def on_timer(self, now_ms: float) -> None:
        """Records that the broker's timer fired."""
        self._append(pack(TimerFired(now_ms)))

    def on_sent(self, now_ms: float, routes: tuple[bytes, ...], frame: bytes) -> None:
        """Records a frame that is about to be sent to the peers of these routes."""
        self._append(pack(FrameSent(now_ms, routes, frame)))

    def flush(self) -> None:
        """Writes the buffered records to the file now, so that they outlive a killed broker."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._buffer and self._file is not None:
            try:
                self._write()
            except OSError as error:
                self._pause_recording(error)

    def close(self) -> None:
        """Records the end of the broker, and closes the file."""
        self._append(pack(BrokerClosed(self._scheduler.now_ms())))
        self.flush()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    # -- inside -----------------------------------------------------------------

    def _append(self, record: bytes) -> None:
        is_full = self._size + len(record) > self._full_bytes and self._has_records()
        if is_full and self._file is not None:
            self._rotate(len(record))
        if self._file is None:
            self._lost += 1
            return
        self._buffer += record
        self._buffered += 1
        self._records += 1
        self._size += len(record)
        if len(self._buffer) >= _FLUSH_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = self._scheduler.call_at(self._scheduler.now_ms() + _FLUSH_MS, self.flush)

    def _has_records(self) -> bool:
        return self._size > self._head_bytes

    def _write(self) -> None:
        assert self._file is not None
        written = 0
        with memoryview(self._buffer) as view:
            while written < len(view):
                written += os.write(self._file, view[written:])
        self._buffer.clear()
        self._written_bytes += written
        self._buffered = 0

    def _rotate(self, next_bytes: int) -> None:
        self.flush()
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        self._kept.append((self._path, self._size))
        try:
            self._open(next_bytes)
        except OSError as error:
            self._pause_recording(error)

    def _open(self, next_bytes: int = 0) -> None:
        """Deletes the oldest files as the size limit requires, and begins the next one.

        Args:
            next_bytes: size of the record that comes next; the file has room for it.
        """
        now_ms = self._scheduler.now_ms()
        began = FileBegan(
            self._boot,
            self._files,
            self._records,
            now_ms,
            time.time(),
            self._software,
            self._config,
            None if self._keys is None else dict(self._keys),
        )
        head = MAGIC + pack(began)
        expected_bytes = max(self._file_limit, 2 * len(head), len(head) + next_bytes)
        room = self._limit_bytes - expected_bytes
        while self._kept and (
            sum(size for _, size in self._kept) > room or len(self._kept) >= _MOST_FILES
        ):
            self._kept.pop(0)[0].unlink(missing_ok=True)
        self._path = self._next_path()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        self._written_bytes = 0
        self._head_bytes = self._size = len(head)
        # A file holds at least as many bytes of records as its head takes.
        self._full_bytes = max(self._file_limit, 2 * len(head))
        self._buffer += head
        self._write()
        self._files += 1

    def _next_path(self) -> Path:
        last = self._path if self._files else (self._kept[-1][0] if self._kept else None)
        number = int(last.name.removesuffix(SUFFIX)) + 1 if last else 1
        return self._folder / f"{number:08d}{SUFFIX}"

    def _pause_recording(self, error: OSError) -> None:
        """Drops the buffered records; records nothing until another file can be made."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._written_bytes)  # removes a partly written record
                if not self._written_bytes:
                    self._path.unlink()
            os.close(self._file)
            self._file = None
            if self._written_bytes:
                self._kept.append((self._path, self._written_bytes))
        if self._retry is None:
            self._on_failure(error)
        self._records -= self._buffered
        self._lost += self._buffered
        self._buffered = 0
        self._buffer.clear()
        self._retry = self._scheduler.call_at(self._scheduler.now_ms() + _RETRY_MS, self._go_on)

    def _go_on(self) -> None:
        try:
            self._open()
        except OSError as error:
            self._pause_recording(error)
            return
        self._retry = None
        lost, self._lost = self._lost, 0
        self._append(pack(RecordsLost(self._scheduler.now_ms(), lost)))
        self._on_recovery(lost)


def journal_files(folder: Path) -> list[Path]:
    """Returns the files of a journal, oldest first."""
    found = folder.glob(f"*{SUFFIX}")
    return sorted(path for path in found if path.name.removesuffix(SUFFIX).isdigit())
