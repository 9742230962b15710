"""The status page of an engine core: 128 bytes that the core writes at every step.

A core that blocks in a collective answers nobody, so what it does must be readable from
outside: it writes into a small shared page (a file, on tmpfs if there is one), and its
sidecar reads that. The page has two slots, written in turn, each with the number of its write
and a checksum: a reader takes the newest slot that is whole. So a writer that is interrupted
in the middle (by a thread that wants the GIL, for milliseconds) keeps no reader waiting, and
whole means whole whatever order the stores of a write become visible in. A write costs a
microsecond or two, and no system call.

Layout: magic ``WBCP``, layout version, and twice: checksum (CRC-32 of what follows it), pid,
number of the write, step, wave, since (ns of CLOCK_MONOTONIC, the same clock for all processes
of a host), waiting, running, rank, phase, flags, untagged. Behind them the process writes the
time, whatever its core does (0: it writes none).
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

from bus.errors import WavebusError
from bus.messages import CorePhase, CoreStatus

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

PAGE_BYTES: Final = 128
_MAGIC: Final = b"WBCP"
_LAYOUT: Final = 4
_HEAD: Final = struct.Struct("<4sI")
_SUM: Final = struct.Struct("<I")
_BODY: Final = struct.Struct("<IQQQQIIHBBI")
_SLOT_BYTES: Final = _SUM.size + _BODY.size
_SLOTS_AT: Final = (_HEAD.size, _HEAD.size + _SLOT_BYTES)
_BEAT: Final = struct.Struct("<Q")
_BEAT_AT: Final = _SLOTS_AT[1] + _SLOT_BYTES
# A process that has not run for so long is frozen; so is a core that stands in a step for so long.
_FROZEN_S: Final = 10.0
_STUCK_MS: Final = 60_000.0
_PHASES: Final[tuple[CorePhase, ...]] = get_args(CorePhase)
_NUMBER: Final = {phase: number for number, phase in enumerate(_PHASES)}
_WRITE: Final = 1  # where a body has the number of its write
_READS: Final = 1000

# Flags.
LOCALLY_PAUSED: Final = 1  # a pause was asked: nothing new is scheduled
GLOBALLY_PAUSED: Final = 2  # all ranks have agreed: no START_DP_WAVE is obeyed
STEPPING: Final = 4  # a wave runs, by this rank's own view


@dataclass(frozen=True, slots=True)
class CoreStatusView:
    """What a page says. ``since_s`` is on ``time.monotonic()``'s clock."""

    pid: int
    rank: int
    phase: CorePhase
    flags: int
    step: int
    wave: int
    since_s: float
    waiting: int
    running: int
    beat_s: float = 0.0
    untagged: int = 0

    @property
    def is_frozen(self) -> bool:
        """Whether requests that reach the core get no further."""
        stands = self.phase not in ("idle", "work") and self.age_ms() > _STUCK_MS
        return stands or 0 < self.beat_s < time.monotonic() - _FROZEN_S

    def message(self) -> CoreStatus:
        """What the broker is told."""
        requests = self.waiting + self.running
        age_ms = round(self.age_ms(), 1)
        return CoreStatus(
            self.phase, age_ms, self.step, self.wave, requests, self.waiting, self.untagged
        )

    def age_ms(self) -> float:
        """For how long the core has been in its phase."""
        return max(0.0, (time.monotonic() - self.since_s) * 1000)


class CoreStatusPage:
    """The core's end. ``path`` is made, readable for its owner alone; None keeps the page in
    this process's memory (see :meth:`view`).

    Numbers set by :meth:`count`, and ``untagged`` (see :class:`bus.messages.CoreStatus`), are
    written with the next :meth:`enter`.
    """

    def __init__(self, path: Path | None, *, rank: int = 0) -> None:
        self.path = path
        self._rank = rank
        self._flags = self._step = self._wave = self._waiting = self._running = 0
        self.untagged = 0
        self._writes = 0
        if path is None:
            self._memory = mmap.mmap(-1, PAGE_BYTES)
        else:
            # A new file: one that is truncated under a reader would kill it (SIGBUS).
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(descriptor, PAGE_BYTES)
                self._memory = mmap.mmap(descriptor, PAGE_BYTES)
            finally:
                os.close(descriptor)
        _HEAD.pack_into(self._memory, 0, _MAGIC, _LAYOUT)
        self.enter("idle")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def count(
        self, *, step: int, wave: int, flags: int = 0, waiting: int = 0, running: int = 0
    ) -> None:
        """New numbers."""
        self._step, self._wave, self._flags = step, wave, flags
        self._waiting, self._running = waiting, running

    def enter(self, phase: CorePhase) -> None:
        """The core begins to do this, now."""
        self._writes += 1
        body = _BODY.pack(
            os.getpid(),
            self._writes,
            self._step,
            self._wave,
            time.monotonic_ns(),
            self._waiting,
            self._running,
            self._rank,
            _NUMBER[phase],
            self._flags,
            self.untagged,
        )
        at = _SLOTS_AT[self._writes % 2]
        self._memory[at : at + _SLOT_BYTES] = _SUM.pack(zlib.crc32(body)) + body

    def beat(self) -> None:
        """The process runs; said by a thread of its own."""
        if not self._memory.closed:
            _BEAT.pack_into(self._memory, _BEAT_AT, time.monotonic_ns())

    def view(self) -> CoreStatusView:
        """What the page says."""
        return _read(self._memory)

    def close(self) -> None:
        """Let go, and take the file away."""
        self._memory.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class NoPage(WavebusError):
    """There is no status page, or it is none of ours."""


class CoreStatusReader:
    """The other end, of a page that may come, go, and come again with a new core."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> CoreStatusView:
        """What the page says now.

        Raises:
            NoPage: there is none (yet, or any more), or it has another layout.
        """
        try:
            with self.path.open("rb") as file, _mapped(file.fileno(), self.path) as memory:
                return _read(memory)
        except OSError as error:
            raise NoPage(f"{self.path}: {error.strerror}") from error


def require_own(descriptor: int) -> None:
    """Let in no page that another user has put there; root reads everybody's.

    Raises:
        PermissionError: it is another user's.
    """
    if os.geteuid() not in (0, os.fstat(descriptor).st_uid):
        raise PermissionError(errno.EPERM, "the page belongs to somebody else")


def _mapped(descriptor: int, path: Path) -> mmap.mmap:
    require_own(descriptor)
    if os.fstat(descriptor).st_size < PAGE_BYTES:
        raise NoPage(f"{path}: shorter than a status page")
    return mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ)


def _read(memory: mmap.mmap) -> CoreStatusView:
    magic, layout = _HEAD.unpack_from(memory)
    if magic != _MAGIC or layout != _LAYOUT:
        raise NoPage(f"not a status page of layout {_LAYOUT} (another version of wavebus?)")
    for _ in range(_READS):
        if whole := [body for at in _SLOTS_AT if (body := _slot(memory, at)) is not None]:
            newest = max(whole, key=lambda body: body[_WRITE])
            pid, _, step, wave, since_ns, waiting, running, rank, phase, flags, untagged = newest
            since_s, beat_s = since_ns / 1e9, _BEAT.unpack_from(memory, _BEAT_AT)[0] / 1e9
            return CoreStatusView(
                pid,
                rank,
                _PHASES[phase],
                flags,
                step,
                wave,
                since_s,
                waiting,
                running,
                beat_s,
                untagged,
            )
    raise NoPage("no slot is whole: the page is just being made, or written faster than it is read")


def _slot(memory: mmap.mmap, at: int) -> tuple[int, ...] | None:
    """What stands in this slot; None while it is being written."""
    slot = memory[at : at + _SLOT_BYTES]
    (checksum,) = _SUM.unpack_from(slot)
    if zlib.crc32(slot[_SUM.size :]) != checksum:
        return None
    return _BODY.unpack_from(slot, _SUM.size)
