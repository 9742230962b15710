"""The lease page of an engine core: which sidecar paused the engine, and until when.

Its file is beside the core's status page (:mod:`sidecar._shared_pages.core_status`). The sidecar
writes the lease of the pause before each engine call that would have to be undone. If the sidecar
dies, and the lease is over, the core reads the page and ends the pause itself
(:mod:`sidecar._vllm.plugin.core.lease_guard`). It then writes what it did, for a later sidecar.

The page has two records (:mod:`sidecar._shared_pages.two_slot_page`), each a MessagePack map: the
sidecar's and the core's.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from bus.messages import Count, ShortText, UpdateId
from sidecar._shared_pages.two_slot_page import (
    RECORDS_AT,
    NoPage,
    TwoSlotRecord,
    make_page,
    open_page,
)

if TYPE_CHECKING:
    import mmap
    from typing import Self

_KIND: Final = b"WBHP"
_LAYOUT: Final = 2
_BODY_BYTES: Final = 8192
_RECORD_BYTES: Final = TwoSlotRecord.size_of(_BODY_BYTES)
PAGE_BYTES: Final = RECORDS_AT + 2 * _RECORD_BYTES
_REASON_CHARS: Final = 256

# waiting: the lease is over, and the engine stays paused until its DP group can agree.
OutcomeState: TypeAlias = Literal["waiting", "resumed", "quarantined"]
# The target of an update that has begun: none, one of the models, or a LoRA adapter.
Begun: TypeAlias = Literal["", "model", "draft", "adapter"]
Parts: TypeAlias = Annotated[tuple[ShortText, ...], Meta(max_length=16)]
MAX_CORES: Final = 256
Cores: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_CORES)]


class PauseLease(msgspec.Struct, frozen=True):
    """The lease of an engine's pause, as the sidecar writes it.

    The class is a ``msgspec.Struct``, which is made quickly: every engine call needs a new lease.

    Attributes:
        serial: the lease's number, by which a :class:`LeaseOutcome` refers to it. Numbers start at
            random in each sidecar.
        pause_id: the pause's id on the bus.
        until_ns: when the lease is over, in ns of this host's CLOCK_MONOTONIC.
        writer_pid: the pid of the sidecar that wrote the lease.
        dp_group: the DP group's name on the bus, for people who read the page.
        version: the weight version that the engine serves.
        begun: the part that an update overwrites now: ``model``, ``draft`` or (LoRA) ``adapter``;
            empty: nothing. A staged update overwrites nothing.
        partial: models that are incomplete: some of an update was loaded, or a sleep discarded
            them.
        asleep: whether the engine has given memory back.
        resuming: whether the sidecar is ending the pause, with all ranks of the DP group.
        cores: pids of the engine's cores if it has several, which end the pause together.
    """

    serial: Count
    pause_id: UpdateId
    until_ns: Count
    writer_pid: Count
    dp_group: ShortText
    version: Count
    begun: Begun
    partial: Parts
    asleep: bool
    resuming: bool
    cores: Cores = ()


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """The engine core's action because a pause lease was over.

    From then on, calls of an update are not permitted under that lease.

    Attributes:
        serial: the number of the lease (:attr:`PauseLease.serial`).
        state: ``resumed``: the engine runs again. ``quarantined``: its weights are incomplete, and
            it rejects requests. ``waiting``: it stays paused until its DP group can agree.
        reason: why, for people.
    """

    serial: Count
    state: OutcomeState
    reason: ShortText


@dataclass(frozen=True, slots=True)
class AbandonedPause:
    """A pause that an earlier sidecar began and did not end.

    Attributes:
        lease: the lease that the earlier sidecar wrote last.
        outcome: the core's action when that lease was over; None if there was none so far.
    """

    lease: PauseLease
    outcome: LeaseOutcome | None

    @property
    def partial(self) -> tuple[str, ...]:
        """The parts of the weights that are incomplete, such as ``model``; empty if none is."""
        quarantined = self.outcome is not None and self.outcome.state == "quarantined"
        return self.lease.partial or (("model",) if quarantined else ())


def lease_path(status_page: Path) -> Path:
    """Returns the path of the lease page beside a core's status page."""
    return status_page.with_suffix(".hold")


class PauseLeasePage:
    """The lease page of one engine core: the sidecar's lease, and the core's outcome.

    The core creates the page with :meth:`make`; all other processes use :meth:`open`.
    """

    def __init__(self, memory: mmap.mmap, path: Path) -> None:
        self.path = path
        self._memory = memory
        self._claim: int | None = None  # the descriptor of the locked file
        self._lease, self._outcome = (
            TwoSlotRecord(memory, RECORDS_AT + half * _RECORD_BYTES, _BODY_BYTES) for half in (0, 1)
        )

    @classmethod
    def make(cls, path: Path) -> PauseLeasePage:
        """Creates a page that only its owner can read."""
        return cls(make_page(path, _KIND, _LAYOUT, PAGE_BYTES), path)

    @classmethod
    def open(cls, path: Path) -> PauseLeasePage:
        """Opens an existing page.

        Raises:
            NoPage: there is no page, or it has another layout.
        """
        return cls(open_page(path, _KIND, _LAYOUT, PAGE_BYTES), path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def claim(self) -> bool:
        """Locks the page for this sidecar; returns False if another sidecar has locked it.

        The lock ends when the page is closed or the process ends.

        Raises:
            NoPage: the page's file is gone: its core has ended.
        """
        try:
            self._claim = os.open(self.path, os.O_RDWR)
        except OSError as error:
            raise NoPage(f"{self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lease(self) -> PauseLease | None:
        """Returns the lease of the engine's pause; None if no lease is written."""
        found: PauseLease | None = _decode(self._lease, PauseLease | None)
        return found

    def write_lease(self, lease: PauseLease | None) -> None:
        """Writes the lease of the engine's pause; None removes the lease.

        Only the sidecar calls this.
        """
        self._lease.write(msgspec.msgpack.encode(lease))

    def outcome(self) -> LeaseOutcome | None:
        """Returns the core's last action because a lease was over; None before the first."""
        found: LeaseOutcome | None = _decode(self._outcome, LeaseOutcome | None)
        return found

    def write_outcome(self, serial: int, state: OutcomeState, reason: str) -> None:
        """Writes the core's action because a lease was over. Only the core calls this.

        Args:
            serial: the number of that lease (:attr:`PauseLease.serial`).
            state: what the core did, as in :class:`LeaseOutcome`.
            reason: why, for people; cut to 256 characters.
        """
        outcome = LeaseOutcome(serial, state, reason[:_REASON_CHARS])
        self._outcome.write(msgspec.msgpack.encode(outcome))

    def abandoned_pause(self, *, paused: bool) -> AbandonedPause | None:
        """Returns the pause that an earlier sidecar began and never ended, or None.

        Args:
            paused: whether the core is paused now. If not, the result is None: a lease on the page
                is out of date.
        """
        lease, end = self.lease(), self.outcome()
        if lease is None or not paused:
            return None
        return AbandonedPause(
            lease, end if end is not None and end.serial == lease.serial else None
        )

    def close(self) -> None:
        """Closes the page, and ends the lock of :meth:`claim`."""
        self._memory.close()
        if self._claim is not None:
            fcntl.flock(self._claim, fcntl.LOCK_UN)  # also where a forked process has the file
            os.close(self._claim)
            self._claim = None


class LeaseInMemory:
    """The pause lease and the outcome of an engine core in the sidecar's own process."""

    def __init__(self) -> None:
        self._lease: PauseLease | None = None
        self._outcome: LeaseOutcome | None = None

    def lease(self) -> PauseLease | None:
        """Returns the sidecar's lease; None if the engine is not paused."""
        return self._lease

    def write_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        """Writes the lease; returns the outcome instead if the core has acted on its end."""
        end = self._outcome
        if lease is not None and end is not None and end.serial == lease.serial:
            return end
        self._lease = lease
        return None

    def outcome(self) -> LeaseOutcome | None:
        """Returns the core's last action because a lease was over; None before the first."""
        return self._outcome

    def write_outcome(self, serial: int, state: OutcomeState, reason: str) -> None:
        """Writes the core's action because a lease was over; see :class:`PauseLeasePage`."""
        self._outcome = LeaseOutcome(serial, state, reason)


def _decode(record: TwoSlotRecord, kind: Any) -> Any:
    body = record.read()
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


def deadline_ns(left_ms: float) -> int:
    """Returns the time ``left_ms`` ms from now, for :attr:`PauseLease.until_ns`."""
    return max(0, time.monotonic_ns() + int(left_ms * 1e6))


def stat_of(pid: int) -> list[str]:
    """Returns the fields of ``/proc/PID/stat``, beginning with the process's state.

    The list is empty if there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Returns whether a process of this host runs; a zombie counts as ended."""
    stat = stat_of(pid)
    return bool(stat) and stat[0] not in "ZX"
