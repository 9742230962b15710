"""Renders records as lines of text, or as JSON objects."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

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
from bus.errors import DecodeError
from bus.messages import codec

if TYPE_CHECKING:
    from bus._journal.reader import Entry
    from bus._journal.records import Record
    from bus.messages import Envelope, Message

_LONGEST_TEXT: Final = 80
_MOST_ENTRIES: Final = 8
_SHOWN_AS_ZERO: Final = ("chunk", "version", "wave", "rank")


@dataclass(frozen=True, slots=True)
class DecodedFrame:
    """A frame of a journal, decoded.

    Attributes:
        peers: the sender of a received frame, or the receivers of a sent one, by name.
        envelope: the frame's envelope; None if it can't be decoded.
        message: the frame's message; None if it can't be decoded.
        fault: why decoding failed; empty if it did not.
    """

    peers: tuple[str, ...]
    envelope: Envelope | None = None
    message: Message | None = None
    fault: str = ""

    @property
    def kind(self) -> str:
        """The message's wire name; ``?`` if the frame can't be decoded."""
        return self.envelope.kind if self.envelope else "?"

    @property
    def update_id(self) -> str:
        """The id of the message's pause or update; empty if it has none."""
        update_id: str = getattr(self.message, "update_id", "")
        return update_id


def peer_of(route: bytes) -> str:
    """Returns the peer's name, with which a ZeroMQ route begins."""
    return route.decode(errors="backslashreplace").rsplit("#", 1)[0]


def decode_frame(record: FrameReceived | FrameSent) -> DecodedFrame:
    """Decodes the frame of a record. A failure is stored in ``fault`` and raises nothing."""
    routes = (record.route,) if isinstance(record, FrameReceived) else record.routes
    peers = tuple(peer_of(route) for route in routes)
    envelope = None
    try:
        envelope = codec.decode_envelope(record.frame)
        return DecodedFrame(peers, envelope, codec.decode_body(envelope))
    except DecodeError as error:
        return DecodedFrame(peers, envelope, None, str(error))


def describe(record: Record) -> str:
    """Describes a record in one line of text, without its time."""
    match record:
        case FileBegan():
            return f"the broker's life {record.boot:x} begins, or its file {record.file}"
        case BrokerClosed():
            return "the broker ended normally"
        case TimerFired():
            return "its timer rang"
        case RecordsLost():
            return f"{record.count} records are missing here: the disk refused them"
        case FrameRefused():
            return f"a frame of {record.size_bytes} bytes from {peer_of(record.route)}, not read"
        case KeysChanged():
            roles = sorted(Counter(record.keys.values()).items())
            text = ", ".join(f"{count} of role {role}" for role, count in roles) or "none"
            return f"other keys are authorised: {text}"
        case FrameReceived() | FrameSent():
            found = decode_frame(record)
            peers = ", ".join(found.peers[:2])
            if len(found.peers) > 2:  # noqa: PLR2004 - two names, and how many more
                peers += f" and {len(found.peers) - 2} more"
            way = "from" if isinstance(record, FrameReceived) else "to"
            text = found.fault or (summary(found.message) if found.message else "")
            return f"{found.kind} {way} {peers}  {text}".rstrip()


def summary(message: Message) -> str:
    """Returns a message's fields as text, without empty ones, and with long ones shortened."""
    fields = ((name, getattr(message, name)) for name in message.__struct_fields__)
    return " ".join(
        f"{name}={_short(value)}"
        for name, value in fields
        if name in _SHOWN_AS_ZERO or value not in ("", (), None, 0, {}, False)
    )


def line(entry: Entry) -> str:
    """Returns a record as one line: number, time, direction and content."""
    ways = {FrameReceived: "<-", FrameRefused: "<-", FrameSent: "->", TimerFired: ".."}
    way = ways.get(type(entry.record), "==")
    return f"{entry.number:>7}  {_clock(entry)}  {way} {describe(entry.record)}"


def as_json(entry: Entry, *, full: bool = False) -> dict[str, Any]:
    """Returns a record as a JSON object.

    Args:
        entry: the record.
        full: True keeps long lists, such as a manifest's names. False replaces each list of more
            than 8 entries by their number.
    """
    record = entry.record
    found: dict[str, Any] = {
        "record": entry.number,
        "file": entry.path.name,
        "offset": entry.offset,
        "now_ms": record.now_ms,
        "time": _wall(entry),
        "what": type(record).__struct_config__.tag,
    }
    if isinstance(record, FrameRefused):
        return found | {"peers": [peer_of(record.route)], "size_bytes": record.size_bytes}
    if not isinstance(record, FrameReceived | FrameSent):
        for name in ("boot", "file", "software", "config", "keys", "count"):
            if hasattr(record, name):
                shown = "file_number" if name == "file" else name
                found[shown] = msgspec.to_builtins(getattr(record, name))
        return found
    decoded = decode_frame(record)
    found |= {
        "kind": decoded.kind,
        "peers": list(decoded.peers),
        "size_bytes": len(record.frame),
    }
    if isinstance(record, FrameReceived) and record.user:
        found["key"] = record.user
    if decoded.envelope is not None:
        names = ("group", "epoch", "sender", "boot", "seq", "id", "reply_to")
        found |= {name: getattr(decoded.envelope, name) for name in names}
    if decoded.message is not None:
        message = msgspec.to_builtins(decoded.message)
        found["message"] = message if full else _shortened(message)
    if decoded.fault:
        found["fault"] = decoded.fault
    return found


def wall_s(entry: Entry) -> float | None:
    """Returns a record's wall-clock time, in seconds since 1970.

    Returns None if the first record of its file is damaged, because only that one has a wall-clock
    time.
    """
    if entry.began is None:
        return None
    return entry.began.wall_s + (entry.record.now_ms - entry.began.now_ms) / 1000


def _wall(entry: Entry) -> str | None:
    seconds = wall_s(entry)
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _clock(entry: Entry) -> str:
    seconds = wall_s(entry)
    if seconds is None:
        return f"{entry.record.now_ms / 1000:.3f}"
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def _short(value: object) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, tuple | list | dict) and len(value) > _MOST_ENTRIES:
        return f"<{len(value)} entries>"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_short(each) for each in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) > 4 * _MOST_ENTRIES:
            return {"entries": len(value)}
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > _MOST_ENTRIES:
            return {"entries": len(value)}
        return [_shortened(each) for each in value]
    return value
