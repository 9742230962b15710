"""Frames to messages and back: typed, strict and bounded.

Decoding goes straight into the dataclasses of :mod:`bus.messages` and checks
types and bounds on the way. What msgspec lets pass for a dataclass, a field
nobody declared, is caught by counting: every declared field is required, so a
map with more entries than the class has fields holds one too many. Where a field has
a default, another one may stand in its place: there names are compared as well. Only then is
the body read a second time, with msgpack's own bounded reader, to name it.

Wire versions are major.minor. Frames of the same major version, and of a minor one that is at
most one apart, are read; others are refused by name. The envelope never changes within a major
version. A minor one may add messages, and fields with defaults: whoever is newer takes the default
where an older peer says nothing, and whoever is older reads over what it doesn't know. Between
equal versions every field is needed, and no other is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack
import msgspec

from bus.errors import DecodeError
from bus.messages import (
    MAX_FRAME_BYTES,
    WIRE_MAJOR,
    WIRE_MINOR,
    WIRE_NAMES,
    Ack,
    Envelope,
    Message,
    NackCode,
)

_KINDS: Final[dict[str, type[Message]]] = {name: cls for cls, name in WIRE_NAMES.items()}
M = TypeVar("M", bound=Message)
_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode

# msgspec ends its texts with the path of the field: "... - at `$.names[3]`", and where the key
# of a map is wrong, "... - at `key` in `$.first_ranks`".
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def _field_count(cls: type) -> int:
    return len(_inner_classes(cls))


def _nested(cls: type) -> tuple[str, ...]:
    """The fields that hold a dataclass, whose own map has to be counted too."""
    return tuple(name for name, inner in _inner_classes(cls).items() if inner is not None)


def _with_defaults(cls: type) -> bool:
    """Whether a field may be missing without msgspec saying so."""
    return any(
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        for field in (dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ())
    )


@functools.cache
def _inner_classes(cls: type) -> dict[str, type | None]:
    """Every field, and the dataclass in it if there is one."""
    return {name: _dataclass_in(hint) for name, hint in get_type_hints(cls).items()}


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass in ``X``, ``X | None`` or ``tuple[X, ...]``, if there is one."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint
    if get_origin(hint) in (Union, types.UnionType, tuple):
        for arg in get_args(hint):
            found = _dataclass_in(arg)
            if found:
                return found
    return None


_FIXMAP: Final = 0x80  # how MessagePack's maps begin
_MAP16: Final = 0xDE
_ENVELOPE_FIELDS: Final = _field_count(Envelope)
_decode_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """How one kind of message is read."""

    cls: type
    decode: Any
    fields: int
    nested: tuple[str, ...]
    by_name: bool  # its fields are to be compared, one by one

    @classmethod
    def of(cls, message: type) -> _Body:
        """Of this class of messages."""
        nested = _nested(message)
        return cls(
            message,
            msgspec.msgpack.Decoder(message).decode,
            _field_count(message),
            nested,
            bool(nested) or _with_defaults(message),
        )


_BODIES: Final = {name: _Body.of(message) for name, message in _KINDS.items()}


def encode_body(message: Message) -> msgspec.Raw:
    """The body of a frame. Encode it once, and put it into as many frames as needed."""
    return msgspec.Raw(_encode(message))


def clip(message: M) -> M:
    """The message with its texts, lists and maps cut to their bounds, so that it is not refused.

    Meant for what an engine says of itself, where the beginning is worth more than nothing. An ack
    has nothing of that but request ids.
    """
    if isinstance(message, Ack) and not message.waited_for:
        return message
    try:
        msgspec.msgpack.decode(_encode(message), type=type(message))
    except msgspec.ValidationError:
        clipped: M = _clip(message, type(message))
        return clipped
    return message


def _clip(value: Any, hint: Any) -> Any:
    is_struct = isinstance(value, msgspec.Struct)
    if is_struct or dataclasses.is_dataclass(value):
        hints = get_type_hints(type(value), include_extras=True)
        cut = {name: _clip(getattr(value, name), inner) for name, inner in hints.items()}
        replace: Any = msgspec.structs.replace if is_struct else dataclasses.replace
        return replace(value, **cut)
    bound = None
    if get_origin(hint) is Annotated:
        hint, *metas = get_args(hint)
        bound = next((meta.max_length for meta in metas if meta.max_length is not None), None)
    if isinstance(value, str):
        return value[:bound]
    if isinstance(value, tuple):
        return tuple(_clip(item, get_args(hint)[0]) for item in value[:bound])
    if isinstance(value, dict):
        key, inner = get_args(hint)
        items = list(value.items())[:bound]
        return {_clip(name, key): _clip(item, inner) for name, item in items}
    return value


def encode(envelope: Envelope) -> bytes:
    """The whole frame."""
    return _encode(envelope)


def encode_frame(
    message: Message,
    sender: str,
    boot: int,
    seq: int,
    *,
    msg_id: int = 0,
    reply_to: int = 0,
    group: str = "",
    epoch: int = 0,
) -> bytes:
    """Returns the frame of a message, in this side's wire version. ``msg_id``: default ``seq``."""
    head = (WIRE_MAJOR, WIRE_MINOR, WIRE_NAMES[type(message)], msg_id or seq, reply_to)
    return _encode(Envelope(*head, sender, boot, group, epoch, seq, encode_body(message)))


def decode(frame: bytes) -> tuple[Envelope, Message]:
    """Read one frame.

    Raises:
        DecodeError: with the NACK code, the field at fault and what is wrong with it.
    """
    envelope = decode_envelope(frame)
    try:
        return envelope, decode_body(envelope)
    except DecodeError as error:
        error.reply_to = envelope.id
        raise


def decode_envelope(frame: bytes) -> Envelope:
    """Read what every frame carries; the body stays unread."""
    if len(frame) > MAX_FRAME_BYTES:
        raise DecodeError(
            NackCode.OVERSIZED, "", f"frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}"
        )
    try:
        envelope = _decode_envelope(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _explain(error, "") from error
    if _map_entries(frame) != _ENVELOPE_FIELDS:
        raise _extra_field(_read(frame), Envelope, "the envelope")
    major, minor = envelope.wire_major, envelope.wire_minor
    if major != WIRE_MAJOR or abs(minor - WIRE_MINOR) > 1:
        raise DecodeError(
            NackCode.WIRE_VERSION,
            "wire_major" if major != WIRE_MAJOR else "wire_minor",
            f"{envelope.sender} speaks wire version {major}.{minor}, this side "
            f"{WIRE_MAJOR}.{WIRE_MINOR}; they may be one minor version apart",
        )
    return envelope


def decode_body(envelope: Envelope) -> Message:
    """Read the body of a frame whose envelope has been read."""
    kind = _BODIES.get(envelope.kind)
    if kind is None:
        raise DecodeError(
            NackCode.UNKNOWN_KIND, "kind", f"no message {envelope.kind!r} in this wire version"
        )
    body = bytes(envelope.body)
    try:
        message: Message = kind.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _explain(error, envelope.kind) from error
    if envelope.wire_minor != WIRE_MINOR:
        newer = envelope.wire_minor > WIRE_MINOR
        _check_other(_read(body), kind.cls, envelope.kind, newer=newer)
        return message
    if _map_entries(body) != kind.fields:
        raise _extra_field(_read(body), kind.cls, envelope.kind)
    if kind.by_name and (kind.nested or _encode(message) != body):
        _check_names(body, kind, envelope.kind)
    return message


def _check_names(body: bytes, kind: _Body, path: str) -> None:
    """Each field is there, once, and so it is in the dataclasses inside; what else there is, such
    as a manifest, is not read again."""
    inner_classes = _inner_classes(kind.cls)
    try:
        found = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError):  # of a key that is none of ours
        raise _extra_field(_read(body), kind.cls, path) from None
    if found.keys() != inner_classes.keys():
        raise _extra_field(_read(body), kind.cls, path)
    for name in kind.nested:
        inner_cls = inner_classes[name]
        assert inner_cls is not None
        value = _read(bytes(found[name]))
        for item in value if type(value) is list else [value]:
            _check_nested(item, inner_cls, f"{path}.{name}")


def _map_entries(data: bytes) -> int:
    """The number of entries that a MessagePack map announces in its first bytes."""
    head = data[0]
    if head & 0xF0 == _FIXMAP:
        return head & 0x0F
    if head == _MAP16:
        return int.from_bytes(data[1:3], "big")
    return int.from_bytes(data[1:5], "big")  # map 32; anything else failed to decode


def _read(data: bytes) -> Any:
    """Untyped reading, bounded by the data's own size; lenient, since it only names a fault.

    Raises:
        DecodeError: a field that nobody declared holds what can't be read at all.
    """
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(data),
        strict_map_key=False,
        unicode_errors="replace",
        object_pairs_hook=_Pairs,
    )
    unpacker.feed(data)
    try:
        return unpacker.unpack()
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise DecodeError(
            NackCode.MALFORMED, "", f"a field too many, which can't be read: {error}"
        ) from error


class _Pairs(list[tuple[str, Any]]):
    """A map as its pairs, so that a key that stands twice is seen twice."""


def _extra_field(pairs: _Pairs, cls: type, where: str) -> DecodeError:
    """Name the field that is one too many."""
    known = _inner_classes(cls)
    seen: set[str] = set()
    for key, _ in pairs:
        if key not in known:
            return DecodeError(NackCode.MALFORMED, str(key)[:64], f"{where} has no such field")
        if key in seen:
            return DecodeError(NackCode.MALFORMED, key, f"{where} has it twice")
        seen.add(key)
    missing = next(name for name in known if name not in seen)
    return DecodeError(NackCode.MALFORMED, missing, f"{where} lacks it")


def _check_other(value: Any, cls: type, path: str, *, newer: bool) -> None:
    """As between equal versions, but: who is newer may say more, who is older less."""
    if not isinstance(value, _Pairs):
        return
    fields = _inner_classes(cls)
    known = _Pairs(pair for pair in value if pair[0] in fields)
    twice = len(known) != len({key for key, _ in known})
    if twice or (newer and len(known) < len(fields)):
        raise _extra_field(known, cls, path)
    if not newer and len(known) != len(value):
        raise _extra_field(value, cls, path)
    for key, inner in known:
        inner_cls = fields[key]
        for item in inner if type(inner) is list else [inner]:
            if inner_cls is not None:
                _check_other(item, inner_cls, f"{path}.{key}", newer=newer)


def _check_nested(value: Any, cls: type, path: str) -> None:
    """Every map inside has exactly the fields of its dataclass."""
    if not isinstance(value, _Pairs):
        return
    fields = _inner_classes(cls)
    if len(value) != len(fields) or {key for key, _ in value} != fields.keys():
        raise _extra_field(value, cls, path)
    for key, inner in value:
        inner_cls = fields[key]
        if inner_cls is None:
            continue
        for item in inner if type(inner) is list else [inner]:
            _check_nested(item, inner_cls, f"{path}.{key}")


def _explain(error: Exception, where: str) -> DecodeError:
    text = str(error)
    found = _PATH.search(text)
    if found is None:
        missing = re.search(r"missing required field `([^`]*)`", text)
        field = missing.group(1) if missing else ""
        return DecodeError(NackCode.MALFORMED, field, f"{where or 'frame'}: {text[:400]}")
    field = found.group(1)
    detail = _PATH.sub("", text)
    missing = re.search(r"missing required field `([^`]*)`", detail)
    if missing:
        field = f"{field}.{missing.group(1)}" if field else missing.group(1)
    code = NackCode.OVERSIZED if "length <=" in detail else NackCode.MALFORMED
    return DecodeError(code, field[:64], f"{where or 'envelope'}: {detail[:400]}")
