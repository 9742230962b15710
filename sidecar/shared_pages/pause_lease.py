"""The lease page of an engine core: by what right the engine is paused, and until when.

It lies beside the core's status page (:mod:`sidecar.shared_pages.core_status`). The sidecar writes
by whom the pause is held and when its lease ends, before each call that would leave something to be
undone; so a sidecar that dies leaves behind what it takes to end the pause without it. The core
writes what it made of a hold whose lease had ended (:mod:`sidecar.vllm.plugin.core.lease_guard`),
and a sidecar that comes (back) finds it here.

Layout: magic ``WBHP``, layout version, then the sidecar's half and the core's. A half has two
slots, written in turn: checksum (CRC-32 of what follows it), length, number of the write, and a
MessagePack map. Readers take the newest slot that is whole.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from bus.errors import WavebusError
from bus.messages import Count, ShortText, UpdateId
from sidecar.shared_pages.core_status import require_own

if TYPE_CHECKING:
    from typing import Self

_MAGIC: Final = b"WBHP"
_LAYOUT: Final = 1
_HEAD: Final = struct.Struct("<4sI")
_SLOT_HEAD: Final = struct.Struct("<IIQ")
_SLOT_BYTES: Final = 8192
_HALF_BYTES: Final = 2 * _SLOT_BYTES
PAGE_BYTES: Final = _HEAD.size + 2 * _HALF_BYTES
_REASON_CHARS: Final = 256
_READS: Final = 1000

# waiting: its lease is over, and it is paused until its DP group can agree.
OutcomeState: TypeAlias = Literal["waiting", "resumed", "quarantined"]
# What an update has begun to bring: nothing, one of the models, or a LoRA adapter.
Begun: TypeAlias = Literal["", "model", "draft", "adapter"]
Parts: TypeAlias = Annotated[tuple[ShortText, ...], Meta(max_length=16)]
MAX_CORES: Final = 256
Cores: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_CORES)]


class PauseLease(msgspec.Struct, frozen=True):
    """What a sidecar holds an engine by. No dataclass: one is made around every engine call.

    Attributes:
        serial: names one pause under one life of a sidecar.
        pause_id: the pause's, on the bus.
        until_ns: when its lease ends, on this host's CLOCK_MONOTONIC.
        writer_pid: of the sidecar.
        dp_group: on the bus; for those who read.
        version: the weight version that the engine serves.
        begun: an update was started that a restore undoes.
        partial: parts of which not all weights are there (:mod:`bus.protocol.engine.update`):
            something of an update was loaded, or a sleep has discarded them.
        asleep: memory was given back.
        resuming: the sidecar is ending the pause; all ranks of its DP group are.
        cores: the processes of all cores behind the engine's one client, which decide as one;
            empty if it has one core.
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
    """What the core has made of a hold on its own account. From then on that hold is void:
    whoever holds it may update nothing."""

    serial: Count
    state: OutcomeState
    reason: ShortText


@dataclass(frozen=True, slots=True)
class AbandonedPause:
    """A pause that an earlier sidecar has left; ``end`` is what the core has made of it."""

    lease: PauseLease
    outcome: LeaseOutcome | None

    @property
    def partial(self) -> tuple[str, ...]:
        """The parts of which not all weights are there."""
        quarantined = self.outcome is not None and self.outcome.state == "quarantined"
        return self.lease.partial or (("model",) if quarantined else ())


class NoPauseLeasePage(WavebusError):
    """There is none, or it is none of ours."""


def lease_path(status_page: Path) -> Path:
    """The lease page beside a core's status page."""
    return status_page.with_suffix(".hold")


class PauseLeasePage:
    """One page: :meth:`make` for the core whose it is, :meth:`open` for all others."""

    def __init__(self, memory: mmap.mmap, path: Path) -> None:
        magic, layout = _HEAD.unpack_from(memory)
        if (magic, layout) != (_MAGIC, _LAYOUT):
            raise NoPauseLeasePage(f"{path}: not a lease page of layout {_LAYOUT}")
        self.path = path
        self._memory = memory

    @classmethod
    def make(cls, path: Path) -> PauseLeasePage:
        """A new one, readable for its owner alone."""
        path.unlink(missing_ok=True)  # never truncated under a reader, which would die of it
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            memory = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        _HEAD.pack_into(memory, 0, _MAGIC, _LAYOUT)
        return cls(memory, path)

    @classmethod
    def open(cls, path: Path) -> PauseLeasePage:
        """One that is there.

        Raises:
            NoPauseLeasePage: there is none, or it has another layout.
        """
        try:
            with path.open("r+b") as file:
                require_own(file.fileno())
                if os.fstat(file.fileno()).st_size < PAGE_BYTES:
                    raise NoPauseLeasePage(f"{path}: shorter than a lease page")
                memory = mmap.mmap(file.fileno(), PAGE_BYTES)
        except OSError as error:
            raise NoPauseLeasePage(f"{path}: {error.strerror}") from error
        return cls(memory, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lease(self) -> PauseLease | None:
        """By what the engine is held now; None: by nothing."""
        found: PauseLease | None = self._read(0, PauseLease | None)
        return found

    def write_lease(self, lease: PauseLease | None) -> None:
        """The sidecar's: hold it so; or not any more."""
        self._write(0, lease)

    def outcome(self) -> LeaseOutcome | None:
        """What the core has last ended on its own account."""
        found: LeaseOutcome | None = self._read(1, LeaseOutcome | None)
        return found

    def write_outcome(self, serial: int, state: OutcomeState, reason: str) -> None:
        """The core's."""
        self._write(1, LeaseOutcome(serial, state, reason[:_REASON_CHARS]))

    def abandoned_pause(self, *, paused: bool) -> AbandonedPause | None:
        """The pause that was left, if the core is ``paused``."""
        lease, end = self.lease(), self.outcome()
        if lease is None or not paused:
            return None
        return AbandonedPause(
            lease, end if end is not None and end.serial == lease.serial else None
        )

    def close(self, *, remove: bool = False) -> None:
        """Let go, and with ``remove`` take the file away."""
        self._memory.close()
        if remove:
            self.path.unlink(missing_ok=True)

    def _slots(self, half: int) -> list[tuple[int, int, bytes]]:
        """Number, place and content of the slots that are whole."""
        found: list[tuple[int, int, bytes]] = []
        for at in range(*_span(half), _SLOT_BYTES):
            slot = self._memory[at : at + _SLOT_BYTES]
            checksum, length, number = _SLOT_HEAD.unpack_from(slot)
            end = _SLOT_HEAD.size + length
            if number and end <= _SLOT_BYTES and zlib.crc32(slot[4:end]) == checksum:
                found.append((number, at, slot[_SLOT_HEAD.size : end]))
        return sorted(found)

    def _write(self, half: int, value: object) -> None:
        slots = self._slots(half)
        number, used = (slots[-1][0], slots[-1][1]) if slots else (0, -1)
        at = next(at for at in range(*_span(half), _SLOT_BYTES) if at != used)
        body = msgspec.msgpack.encode(value)
        slot = _SLOT_HEAD.pack(0, len(body), number + 1) + body
        self._memory[at : at + len(slot)] = zlib.crc32(slot[4:]).to_bytes(4, "little") + slot[4:]

    def _read(self, half: int, kind: Any) -> Any:
        for _ in range(_READS):
            if slots := self._slots(half):
                return msgspec.msgpack.decode(slots[-1][2], type=kind)
            if not any(self._memory[_HEAD.size + half * _HALF_BYTES :][:_HALF_BYTES]):
                return None  # nobody has written yet
        raise NoPauseLeasePage(f"{self.path}: no slot is whole")


def _span(half: int) -> tuple[int, int]:
    begin = _HEAD.size + half * _HALF_BYTES
    return begin, begin + _HALF_BYTES


def deadline_ns(left_ms: float) -> int:
    """That far from now, as :attr:`PauseLease.until_ns`."""
    return max(0, time.monotonic_ns() + int(left_ms * 1e6))


def stat_of(pid: int) -> list[str]:
    """What the kernel tells of a process behind its name: its state, its parent, and so on. Empty
    if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs: one that has ended and was not awaited does not."""
    stat = stat_of(pid)
    return bool(stat) and stat[0] not in "ZX"
