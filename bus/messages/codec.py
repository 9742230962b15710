"""Encodes messages as frames, and decodes frames: typed, strict and bounded.

msgspec decodes straight into the structs of :mod:`bus.messages`, and checks types and bounds.
It accepts undeclared fields, duplicate fields, and missing fields that have a default. To find
these, the decoder encodes the message again. If the bytes differ, msgpack's own bounded reader
reads both, and their maps are compared: every field is required, once, and no other is accepted.

Frames of another wire version are refused with a reason. The envelope never changes, so that the
reason can be given.
"""

from __future__ import annotations

import re
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack
import msgspec

from bus.errors import DecodeError
from bus.messages import (
    MAX_FRAME_BYTES,
    WIRE_NAMES,
    WIRE_VERSION,
    Ack,
    Envelope,
    Message,
    NackCode,
)

if TYPE_CHECKING:
    from collections.abc import Collection

M = TypeVar("M", bound=Message)
_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode

# msgspec ends its texts with the path of the field: "... - at `$.names[3]`", and where the key
# of a map is wrong, "... - at `key` in `$.first_ranks`".
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


# An envelope's first byte: MessagePack's fixmap with its number of fields. All are required.
_ENVELOPE_HEAD: Final = 0x80 | len(Envelope.__struct_fields__)
# The decoder of each message, by wire name.
_KINDS: Final = {name: msgspec.msgpack.Decoder(cls).decode for cls, name in WIRE_NAMES.items()}


def encode_body(message: Message) -> msgspec.Raw:
    """Returns the encoded body of a frame, which several frames can share.

    Args:
        message: the message.
    """
    return msgspec.Raw(_encode(message))


def clip(message: M) -> M:
    """Returns the message with its texts, lists and maps cut to their bounds.

    Engines may return texts that are too long. A receiver would refuse the whole message. In an
    ACK, only the list of request ids can be too long.
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
    if isinstance(value, msgspec.Struct):
        hints = get_type_hints(type(value), include_extras=True)
        cut = {name: _clip(getattr(value, name), inner) for name, inner in hints.items()}
        return msgspec.structs.replace(value, **cut)
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
    """Returns a whole frame.

    Args:
        envelope: the envelope, with its body encoded.
    """
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
    """Returns a message as a frame of this side's wire version.

    Args:
        message: the message.
        sender: the name of the sending peer.
        boot: identifies the sending process; after a restart it is another number.
        seq: grows with every frame of one ``boot``.
        msg_id: the message's id, which a repetition keeps; 0: ``seq``.
        reply_to: the id of the message that this one answers; 0: none.
        group: the group that the message concerns; empty: none.
        epoch: the group's fencing epoch.
    """
    head = (WIRE_VERSION, WIRE_NAMES[type(message)], msg_id or seq, reply_to)
    return _encode(Envelope(*head, sender, boot, group, epoch, seq, encode_body(message)))


def decode(frame: bytes) -> tuple[Envelope, Message]:
    """Returns the envelope and the message of one frame.

    Raises:
        DecodeError: the frame is no valid message. The error has the code of the NACK that answers
            the frame, the wrong field, and the reason.
    """
    envelope = decode_envelope(frame)
    try:
        return envelope, decode_body(envelope)
    except DecodeError as error:
        error.reply_to = envelope.id
        raise


def decode_envelope(frame: bytes) -> Envelope:
    """Returns the envelope of a frame; its body stays encoded. Raises as :func:`decode`."""
    if len(frame) > MAX_FRAME_BYTES:
        raise DecodeError(
            NackCode.OVERSIZED, "", f"the frame has {len(frame)} bytes; at most {MAX_FRAME_BYTES}"
        )
    try:
        envelope = _decode_envelope(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _explain(error, "") from error
    if frame[0] != _ENVELOPE_HEAD:
        _check_names(_read(frame), Envelope.__struct_fields__, "the envelope")
    if envelope.wire_version != WIRE_VERSION:
        raise DecodeError(
            NackCode.WIRE_VERSION,
            "wire_version",
            f"{envelope.sender} uses wire version {envelope.wire_version}, and this side uses "
            f"{WIRE_VERSION}",
        )
    return envelope


def decode_body(envelope: Envelope) -> Message:
    """Returns the message of a decoded envelope. Raises as :func:`decode`."""
    if envelope.kind not in _KINDS:
        raise DecodeError(
            NackCode.UNKNOWN_KIND,
            "kind",
            f"wire version {WIRE_VERSION} has no message {envelope.kind!r}",
        )
    decode_into = _KINDS[envelope.kind]
    body = bytes(envelope.body)
    try:
        message: Message = decode_into(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _explain(error, envelope.kind) from error
    if (whole := _encode(message)) != body:
        _check_fields(_read(body), _read(whole), envelope.kind)
    return message


def _read(data: bytes) -> Any:
    """Decodes MessagePack data without types, bounded by the size of the data.

    Raises:
        DecodeError: an undeclared field holds a value that can't be decoded.
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
            NackCode.MALFORMED, "", f"an undeclared field has an unreadable value: {error}"
        ) from error


class _Pairs(list[tuple[str, Any]]):
    """The key-value pairs of a map, as a list, which shows duplicate keys."""


def _check_names(pairs: _Pairs, known: Collection[str], where: str) -> None:
    """Checks that a map has these fields, each once.

    Raises:
        DecodeError: names the undeclared, duplicate or missing field.
    """
    seen: set[str] = set()
    for name, _ in pairs:
        if name not in known:
            raise DecodeError(NackCode.MALFORMED, str(name)[:64], f"{where} has no such field")
        if name in seen:
            raise DecodeError(NackCode.MALFORMED, name, f"{where} has this field twice")
        seen.add(name)
    for name in known:
        if name not in seen:
            raise DecodeError(NackCode.MALFORMED, name, f"{where} lacks this field")


def _check_fields(found: Any, whole: Any, where: str) -> None:
    """Checks the field names of a map, and of the maps in it, against those of ``whole``.

    Raises:
        DecodeError: as :func:`_check_names`.
    """
    if isinstance(whole, _Pairs):
        known = dict(whole)
        _check_names(found, known, where)
        for name, value in found:
            _check_fields(value, known[name], f"{where}.{name}")
    elif isinstance(whole, list):
        for each, other in zip(found, whole, strict=True):
            _check_fields(each, other, where)


def _explain(error: Exception, where: str) -> DecodeError:
    text = str(error)
    found = _PATH.search(text)
    detail = _PATH.sub("", text)
    path = [found.group(1)] if found and found.group(1) else []
    if missing := re.search(r"missing required field `([^`]*)`", detail):
        path.append(missing.group(1))
    code = NackCode.OVERSIZED if "length <=" in detail else NackCode.MALFORMED
    where = where or ("envelope" if found else "frame")
    return DecodeError(code, ".".join(path)[:64], f"{where}: {detail[:400]}")
