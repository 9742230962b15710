"""The status page of an engine core, which the core writes at every step.

A core that blocks in a collective answers no calls, so its state must be readable from outside. The
core writes its state into a small shared page (:mod:`sidecar._shared_pages.two_slot_page`), and its
sidecar reads that page.

The page's record: pid, step, wave, since (ns of CLOCK_MONOTONIC, the same clock for all processes
of a host), waiting, running, untagged, limit (ms), rank, phase, flags. After the record comes the
time of the last beat. A separate thread of the core's process renews that time, also while the core
blocks. 0 means that the process has no such thread.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

from bus.messages import CorePhase, CoreStatus
from sidecar._shared_pages.two_slot_page import (
    RECORDS_AT,
    NoPage,
    TwoSlotRecord,
    make_page,
    open_page,
)

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

_KIND: Final = b"WBCP"
_LAYOUT: Final = 6
_BODY: Final = struct.Struct("<IQQQIIIIHBB")
_BEAT: Final = struct.Struct("<Q")
_BEAT_AT: Final = RECORDS_AT + TwoSlotRecord.size_of(_BODY.size)
PAGE_BYTES: Final = _BEAT_AT + _BEAT.size
# A process without a beat for _FROZEN_S is frozen, and so is a core whose step takes longer than
# the page's limit, which is between _STEP_MS and _STUCK_MS (StepLimit).
_FROZEN_S: Final = 10.0
_STEP_MS: Final = 10_000.0
_STUCK_MS: Final = 60_000.0
_FIRST_STEPS: Final = 10  # these may compile, or capture graphs
_TIMES_SLOWEST: Final = 4
_TIMES_LONGEST: Final = 2
_PHASES: Final[tuple[CorePhase, ...]] = get_args(CorePhase)
_NUMBER: Final = {phase: number for number, phase in enumerate(_PHASES)}

# Flags.
LOCALLY_PAUSED: Final = 1  # a pause was requested: nothing new is scheduled
GLOBALLY_PAUSED: Final = 2  # all ranks have agreed: START_DP_WAVE starts no wave
STEPPING: Final = 4  # a wave runs, as far as this rank has seen


@dataclass(frozen=True, slots=True)
class CoreStatusView:
    """The state of an engine core, as read from its status page.

    Attributes:
        pid: the pid of the core's process.
        rank: the core's rank in its DP group.
        phase: what the core does.
        flags: the sum of the flags that are set (``LOCALLY_PAUSED`` and so on in this module).
        step: how many steps the core has run.
        wave: the number of the core's current wave.
        since_s: when the core's phase began, in seconds of ``time.monotonic()``.
        waiting, running: how many requests wait in the core, and how many run.
        beat_s: when the process last showed that it runs, on the same clock; 0: unknown.
        untagged: how many requests since the core's start had a KV cache that names no version.
        limit_ms: how long the phase may take until the core counts as frozen.
    """

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
    limit_ms: float = _STUCK_MS

    @property
    def is_frozen(self) -> bool:
        """Whether requests can't proceed.

        True if the process has shown no sign of life for 10 s, for example because it is stopped;
        or if the core has been in one step for longer than :class:`StepLimit` allows, or in one
        wait for other ranks for over 60 s.
        """
        stands = self.phase not in ("idle", "work") and self.age_ms() > self.limit_ms
        return stands or 0 < self.beat_s < time.monotonic() - _FROZEN_S

    def message(self) -> CoreStatus:
        """Returns the message that reports this state to the broker."""
        requests = self.waiting + self.running
        age_ms = round(self.age_ms(), 1)
        return CoreStatus(
            self.phase, age_ms, self.step, self.wave, requests, self.waiting, self.untagged
        )

    def age_ms(self) -> float:
        """Returns for how long the core has been in its phase, in ms."""
        return max(0.0, (time.monotonic() - self.since_s) * 1000)


class StepLimit:
    """Decides how long a step may take until its core counts as frozen.

    Only the core's earlier steps show whether a step is slow or has no end. So a step with requests
    may take four times as long as the slowest step before, at least 10 s and at most 60 s. A step
    may take 60 s

    - if it is one of the core's first ten, which may compile or capture graphs,
    - while a new prompt is more than twice as long as every earlier prompt.

    The first ten steps, and steps that were too long without such a prompt, do not count as earlier
    steps.
    """

    def __init__(self) -> None:
        self._slowest_ms = 0.0
        self._longest = 0  # tokens of the longest prompt whose first step has ended
        self._new = 0  # tokens of the longest prompt whose first step has not

    def on_prompt(self, tokens: int) -> None:
        """Records the length of a prompt that has come."""
        self._new = max(self._new, tokens)

    def limit_ms(self, step: int, requests: int) -> float:
        """Returns how long a step may take."""
        if step < _FIRST_STEPS or not requests or self._new > _TIMES_LONGEST * self._longest:
            return _STUCK_MS
        return min(max(_TIMES_SLOWEST * self._slowest_ms, _STEP_MS), _STUCK_MS)

    def on_step(self, took_ms: float, limit_ms: float, *, step: int, waiting: int) -> None:
        """Records the end of a step.

        Args:
            limit_ms: how long the step was allowed to take.
            step: how many steps the core had run before it.
        """
        if step >= _FIRST_STEPS and (self._new or took_ms <= limit_ms):
            self._slowest_ms = max(self._slowest_ms, took_ms)
        if not waiting:
            if step >= _FIRST_STEPS:
                self._longest = max(self._longest, self._new)
            self._new = 0


class CoreStatusPage:
    """Writes the status page of one engine core; only the core's process uses it.

    Numbers that :meth:`count` sets appear on the page with the next :meth:`enter`.

    Args:
        path: the page's file, readable for its owner alone; None keeps the page in this process's
            memory, where nobody else reads it.

    Attributes:
        path: the page's file, or None.
        limit: decides how long steps may take.
    """

    def __init__(self, path: Path | None, *, rank: int = 0) -> None:
        self.path = path
        self._rank = rank
        self._step, self._wave, self._flags = 0, 0, 0
        self._requests = (0, 0, 0)  # waiting, running, untagged
        self.limit = StepLimit()
        self._begun: tuple[int, int, float] | None = None  # the step under way: number, ns, limit
        self._memory = make_page(path, _KIND, _LAYOUT, PAGE_BYTES)
        self._record = _record(self._memory)
        self.enter("idle")

    def count(
        self,
        *,
        step: int,
        wave: int,
        flags: int = 0,
        waiting: int = 0,
        running: int = 0,
        untagged: int = 0,
    ) -> None:
        """Sets the numbers that the next :meth:`enter` writes.

        Args:
            wave: the number of the core's current wave.
            flags: the sum of the flags that are set.
            untagged: as in :class:`CoreStatusView`.
        """
        self._step, self._wave, self._flags = step, wave, flags
        self._requests = (waiting, running, untagged)

    def enter(self, phase: CorePhase) -> None:
        """Writes to the page which phase begins now, with the numbers of :meth:`count`."""
        now_ns = time.monotonic_ns()
        waiting, running, _ = self._requests
        if self._begun is not None:
            step, begun_ns, limit_ms = self._begun
            took_ms = (now_ns - begun_ns) / 1e6
            self.limit.on_step(took_ms, limit_ms, step=step, waiting=waiting)
            self._begun = None
        limit_ms = _STUCK_MS
        if phase == "step":
            limit_ms = self.limit.limit_ms(self._step, waiting + running)
            self._begun = (self._step, now_ns, limit_ms)
        body = _BODY.pack(
            os.getpid(),
            self._step,
            self._wave,
            now_ns,
            *self._requests,
            round(limit_ms),
            self._rank,
            _NUMBER[phase],
            self._flags,
        )
        self._record.write(body)

    def beat(self) -> None:
        """Records on the page that the process runs now. A separate thread calls this method."""
        if not self._memory.closed:
            _BEAT.pack_into(self._memory, _BEAT_AT, time.monotonic_ns())

    def view(self) -> CoreStatusView:
        """Returns the state that the page shows now."""
        return _read(self._memory)

    def close(self) -> None:
        """Closes the page, and deletes its file."""
        self._memory.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class CoreStatusReader:
    """Reads a core's status page from another process.

    The page's file may be missing, or replaced by that of a new core, so each read opens it again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> CoreStatusView:
        """Returns the state that the page shows now.

        Raises:
            NoPage: there is no page (yet, or any more), or it has another layout.
        """
        with open_page(self.path, _KIND, _LAYOUT, PAGE_BYTES) as memory:
            return _read(memory)


def _record(memory: mmap.mmap) -> TwoSlotRecord:
    return TwoSlotRecord(memory, RECORDS_AT, _BODY.size)


def _read(memory: mmap.mmap) -> CoreStatusView:
    body = _record(memory).read()
    if body is None:
        raise NoPage("the page is still being created")
    pid, step, wave, since_ns, *requests, limit_ms, rank, phase, flags = _BODY.unpack(body)
    waiting, running, untagged = requests
    (beat_ns,) = _BEAT.unpack_from(memory, _BEAT_AT)
    return CoreStatusView(
        pid=pid,
        rank=rank,
        phase=_PHASES[phase],
        flags=flags,
        step=step,
        wave=wave,
        since_s=since_ns / 1e9,
        waiting=waiting,
        running=running,
        untagged=untagged,
        limit_ms=limit_ms,
        beat_s=beat_ns / 1e9,
    )
