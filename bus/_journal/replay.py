"""Replays a journal in a new broker state machine, and compares the sent frames.

The state machine has no clock and no randomness, so the same frames at the same times make it send
the same frames. The broker's server sends them at once, but gathers the answers to heartbeats first
(:mod:`bus._runtime.heartbeat_acks`). The replay gathers them in the same way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bus._journal.explain import findings
from bus._journal.reader import Gap
from bus._journal.records import (
    BrokerClosed,
    FileBegan,
    FrameReceived,
    FrameRefused,
    FrameSent,
    KeysChanged,
    RecordsLost,
    TimerFired,
)
from bus._journal.render import describe, peer_of, summary
from bus._protocol.broker.broker import Broker
from bus._protocol.core.effects import Note, Send
from bus._runtime.heartbeat_acks import HeartbeatAcks
from bus.errors import DecodeError
from bus.messages import WIRE_NAMES, HeartbeatAck, Status, codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bus._journal.reader import Entry, Item
    from bus._protocol.core.effects import Effect
    from bus.messages import Envelope, Message


@dataclass(frozen=True, slots=True)
class Difference:
    """The point at which a replay and the journal disagree.

    Attributes:
        entry: the journal's record.
        expected: what the replayed broker did, as text.
        found: what the journal has instead, as text.
        waits: why groups make no progress at that moment, one sentence per engine.
    """

    entry: Entry
    expected: str
    found: str
    waits: tuple[str, ...]

    def __str__(self) -> str:
        seconds = self.entry.record.now_ms / 1000
        where = f"record {self.entry.number} ({self.entry.path.name}, {seconds:.3f} s)"
        lines = [
            f"differs at {where}",
            f"  expected  {self.expected}",
            f"  came      {self.found}",
            *(f"  recomputed, {text}" for text in self.waits),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """The result of one replayed record.

    Attributes:
        entry: the record.
        notes: what the replayed broker logs at this record.
        difference: how the replay and the journal disagree here; None: they agree.
    """

    entry: Entry
    notes: tuple[Note, ...] = ()
    difference: Difference | None = None


class Replay:
    """Replays one life of a broker in a new state machine.

    Args:
        began: the first record of that life. :meth:`feed` takes the records after it, in order.

    Attributes:
        boot: the random number of that life.
        machine: the state machine of the broker.
        now_ms: the time of the last replayed record, on the broker's clock.
        closed: whether the journal says that the broker shut down in order.
        received: how many frames were given to the machine.
        sent: how many sent frames the journal has so far.
    """

    def __init__(self, began: FileBegan) -> None:
        self.boot = began.boot
        self.machine = Broker(began.config, began.keys)
        self.now_ms = began.now_ms
        self.closed = False
        self.received = 0
        self.sent = 0
        self._acks = HeartbeatAcks()
        self._due: deque[Send] = deque()  # frames that the journal must have next

    @property
    def unsent(self) -> int:
        """The number of frames that the machine sent and the journal lacks so far."""
        return len(self._due)

    def status(self) -> Status:
        """Returns the status of the replayed broker at the last record."""
        return self.machine.status(self.now_ms)

    def feed(self, entry: Entry) -> ReplayStep:
        """Replays one record. After a difference, the results of later records are meaningless."""
        record = entry.record
        match record:
            case FrameReceived() | FrameRefused() | KeysChanged() | TimerFired():
                self.now_ms = record.now_ms
                if self._due:
                    missed = _describe_send(self._due[0])
                    return self._difference(
                        entry, missed, f"{describe(record)}, before it was sent"
                    )
                effects = self._effects(record)
                if isinstance(effects, str):
                    return self._difference(entry, effects, describe(record))
                return ReplayStep(entry, self._perform(effects))
            case FrameSent():
                self.sent += 1
                if not self._due:
                    self._due.extend(self._acks.take())
                if not self._due:
                    return self._difference(entry, "nothing is sent", describe(record))
                expected = self._due.popleft()
                found = _mismatch(expected, record)
                if found:
                    return self._difference(
                        entry, _describe_send(expected), f"{describe(record)}: {found}"
                    )
            case BrokerClosed():
                self.closed = True
        return ReplayStep(entry)

    def _effects(
        self, record: FrameReceived | FrameRefused | KeysChanged | TimerFired
    ) -> list[Effect] | str:
        """Returns the machine's effects; a text if it treats the frame unlike the journal."""
        match record:
            case TimerFired():
                return self.machine.tick(record.now_ms)
            case KeysChanged():
                return self.machine.rekey(record.keys, record.now_ms)
            case FrameRefused():
                effects = self.machine.admit(record.route, record.size_bytes, record.now_ms)
                return effects or ("it is read" if effects is None else "it is dropped silently")
            case FrameReceived():
                return self._read(record)

    def _read(self, record: FrameReceived) -> list[Effect] | str:
        if self.machine.admit(record.route, len(record.frame), record.now_ms) is not None:
            return "it is refused unread"
        self.received += 1
        try:
            envelope, message = codec.decode(record.frame)
        except DecodeError as error:
            return self.machine.on_malformed_frame(record.route, error, record.now_ms)
        return self.machine.receive(record.route, envelope, message, record.now_ms, record.user)

    def _perform(self, effects: Iterable[Effect]) -> tuple[Note, ...]:
        notes: list[Note] = []
        for effect in effects:
            if isinstance(effect, Note):
                notes.append(effect)
            elif isinstance(effect.message, HeartbeatAck):
                self._acks.add(effect.message, effect)
            else:
                self._due.extend(self._acks.take())
                self._due.append(effect)
        return tuple(notes)

    def _difference(self, entry: Entry, expected: str, found: str) -> ReplayStep:
        waits = tuple(each.text for each in findings(self.status()) if each.waiting)
        return ReplayStep(entry, difference=Difference(entry, expected, found, waits))


@dataclass(frozen=True, slots=True)
class Unplayable:
    """Why one life of a broker can't be replayed, or not to its end.

    Attributes:
        reason: the reason, as text.
        damaged: True: bytes of a file are damaged. False: records are missing, because a file was
            deleted or could not be written.
    """

    reason: str
    damaged: bool


def replay_lives(
    items: Iterable[Item], *, upto: int | None = None
) -> Iterator[tuple[Replay, ReplayStep] | Unplayable]:
    """Replays all lives in a journal, each from its beginning, up to the first difference.

    A life without its first file can't be replayed, nor can the records after a damaged one.

    Args:
        items: the records, from :func:`bus._journal.reader.read`.
        upto: the number of the last record to replay in each life; None: all.

    Yields:
        For each replayed record, the life's replay and the result; or why a life can't be replayed.
    """
    replay: Replay | None = None
    boot = file = 0
    for item in items:
        if isinstance(item, Gap):
            if item.kind == "damaged":
                replay = None
                yield Unplayable(
                    f"{item}; what came in there is not known, and what follows can't be replayed",
                    damaged=True,
                )
            continue
        record = item.record
        if isinstance(record, FileBegan):
            goes_on = record.boot == boot and record.file == file + 1
            if record.file == 0:
                replay = Replay(record)
            elif record.boot != boot or (replay is not None and not goes_on):
                replay = None
                yield Unplayable(
                    f"{item.path} begins with record {record.records + 1} of broker "
                    f"{record.boot:x}: a replay needs its first file, which is not there (older "
                    "files are dropped; give the broker more --journal-bytes)",
                    damaged=False,
                )
            boot, file = record.boot, record.file
        elif isinstance(record, RecordsLost):
            replay = None
            yield Unplayable(
                f"{item.path}: {describe(record)}; what follows can't be replayed", damaged=False
            )
        elif replay is not None and (upto is None or item.number <= upto):
            step = replay.feed(item)
            yield replay, step
            if step.difference is not None:
                return


def _describe_send(send: Send) -> str:
    peers = ", ".join(peer_of(route) for route in send.routes)
    return f"{WIRE_NAMES[type(send.message)]} to {peers}  {summary(send.message)}"


def _mismatch(expected: Send, record: FrameSent) -> str:
    """Returns how a recorded frame differs from the expected one; empty if it does not."""
    try:
        envelope, message = codec.decode(record.frame)
    except DecodeError as error:
        return f"can't be read: {error}"
    if isinstance(message, Status):  # the server adds values that the machine can't know
        message = replace(message, cpu_s=0.0, rss_bytes=0)
    if type(message) is not type(expected.message):
        return "another message"
    if sorted(record.routes) != sorted(expected.routes):
        return "goes to other peers"
    for name in ("reply_to", "group", "epoch"):
        is_now, was = getattr(expected, name), getattr(envelope, name)
        if is_now != was:
            return f"its {name} is {was!r}, expected {is_now!r}"
    # Encode and decode, so that the fields have the types of the frame's.
    again = codec.decode_body(_with_body(envelope, expected.message))
    for name in message.__struct_fields__:
        is_now, was = getattr(again, name), getattr(message, name)
        if is_now != was:
            return f"its {name} is {was!r}, expected {is_now!r}"
    return ""


def _with_body(envelope: Envelope, message: Message) -> Envelope:
    return replace(envelope, body=codec.encode_body(message))
