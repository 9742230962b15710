"""Shared-memory pages with records that a reader always finds complete.

A page is a small file, on tmpfs if there is one. One process creates the page, and others map it.
Each record has two slots, which are written in turn. A slot holds a checksum (CRC-32 of the fields
after it), the body's length, the number of the write, and the body. Readers take the newest slot
whose checksum is right. So a writer that dies in the middle of a write never blocks a reader, in
whatever order its stores become visible. A write takes a few microseconds and no system call.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING, Final

from bus.errors import WavebusError

if TYPE_CHECKING:
    from pathlib import Path

_PAGE_HEAD: Final = struct.Struct("<4sI")
_SLOT_HEAD: Final = struct.Struct("<IIQ")
_SUM: Final = struct.Struct("<I")
_LENGTH_AND_NUMBER: Final = struct.Struct("<IQ")
_NUMBER: Final = struct.Struct("<Q")
_NUMBER_AT: Final = _SLOT_HEAD.size - _NUMBER.size
_READS: Final = 1000
RECORDS_AT: Final = _PAGE_HEAD.size


class NoPage(WavebusError):
    """A page is missing, not readable, or of another kind or layout."""


def make_page(path: Path | None, kind: bytes, layout: int, size_bytes: int) -> mmap.mmap:
    """Creates a page that only its owner can read.

    Args:
        path: the page's file; None keeps the page in this process's memory.
        kind: four bytes that name the kind of page; a reader expects the same.
        layout: the version of the page's layout; a reader expects the same.
        size_bytes: the page's size in bytes.
    """
    if path is None:
        memory = mmap.mmap(-1, size_bytes)
    else:
        # A new file: one that is truncated under a reader would kill that process (SIGBUS).
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
            memory = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    _PAGE_HEAD.pack_into(memory, 0, kind, layout)
    return memory


def open_page(path: Path, kind: bytes, layout: int, size_bytes: int) -> mmap.mmap:
    """Maps a page that another process has made.

    Args:
        kind: four bytes that name the expected kind of page.
        layout: the expected version of the page's layout.
        size_bytes: the page's size in bytes.

    Raises:
        NoPage: the page is missing, belongs to another user, or is of another kind or layout.
    """
    try:
        with path.open("r+b") as file:
            found = os.fstat(file.fileno())
            # Any user who can write to the folder could forge a page. Root reads all users' pages.
            if os.geteuid() not in (0, found.st_uid):
                raise PermissionError(errno.EPERM, "the page belongs to another user")
            if found.st_size < size_bytes:
                raise NoPage(f"{path}: shorter than a page of {size_bytes} bytes")
            memory = mmap.mmap(file.fileno(), size_bytes)
    except OSError as error:
        raise NoPage(f"{path}: {error.strerror}") from error
    if _PAGE_HEAD.unpack_from(memory) != (kind, layout):
        memory.close()
        raise NoPage(f"{path}: not a page of layout {layout} (another version of wavebus?)")
    return memory


class TwoSlotRecord:
    """Reads and writes one record of a page; only one process may write.

    Args:
        at: where the record begins, in bytes.
        body_bytes: the length of the longest body, in bytes.
    """

    def __init__(self, memory: mmap.mmap, at: int, body_bytes: int) -> None:
        self._memory = memory
        self._slots: Final = (at, at + _SLOT_HEAD.size + body_bytes)
        self._body_bytes = body_bytes
        self._written = 0  # the number of this process's last write

    @staticmethod
    def size_of(body_bytes: int) -> int:
        """Returns how many bytes of a page a record takes, with both slots.

        Args:
            body_bytes: the length of the longest body, in bytes.
        """
        return 2 * (_SLOT_HEAD.size + body_bytes)

    def write(self, body: bytes) -> None:
        """Writes ``body`` over the older slot; the newer slot stays readable."""
        if not self._written or self._written < max(self._numbers()):
            self._written = max((number for number, _ in self._whole()), default=0)
        self._written = number = self._written + 1
        tail = _LENGTH_AND_NUMBER.pack(len(body), number) + body
        at = self._slots[number % 2]
        self._memory[at : at + _SUM.size + len(tail)] = _SUM.pack(zlib.crc32(tail)) + tail

    def read(self) -> bytes | None:
        """Returns the newest complete body; None before the first write.

        Raises:
            NoPage: no slot is complete. Either the first write is under way, or the record is
                written faster than it is read.
        """
        for _ in range(_READS):
            if found := self._whole():
                return max(found)[1]
            if not any(self._numbers()):
                return None
        raise NoPage("the page has no complete record")

    def _numbers(self) -> tuple[int, int]:
        """Returns the write number of each slot, complete or not."""
        first, second = self._slots
        (one,) = _NUMBER.unpack_from(self._memory, first + _NUMBER_AT)
        (other,) = _NUMBER.unpack_from(self._memory, second + _NUMBER_AT)
        return one, other

    def _whole(self) -> list[tuple[int, bytes]]:
        """Returns write number and body of each complete slot."""
        found: list[tuple[int, bytes]] = []
        for at in self._slots:
            slot = self._memory[at : at + _SLOT_HEAD.size + self._body_bytes]
            checksum, length, number = _SLOT_HEAD.unpack_from(slot)
            end = _SLOT_HEAD.size + length
            if number and end <= len(slot) and zlib.crc32(slot[_SUM.size : end]) == checksum:
                found.append((number, slot[_SLOT_HEAD.size : end]))
        return found
