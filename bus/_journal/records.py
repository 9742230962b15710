"""The records of a journal, and their encoding with length and checksum.

A file is :data:`MAGIC` and then records, one after the other::

    MARK (4 bytes) | length of the body (4, little-endian) | CRC-32 of the body (4) | body

The body is one of the classes below as a MessagePack array that begins with its tag. The
first record of every file is :class:`FileBegan`.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias
from zlib import crc32

import msgspec

from bus._protocol.core.access import KeyRole  # noqa: TC001 - msgspec looks it up
from bus._protocol.core.config import BrokerConfig  # noqa: TC001 - msgspec looks it up

MAGIC: Final = b"wavebus journal 1\n"
MARK: Final = b"\xf7WB\xf8"
SUFFIX: Final = ".journal"
_PREFIX: Final = struct.Struct("<4sII")
PREFIX_BYTES: Final = _PREFIX.size


class FileBegan(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """The first record of each file.

    Attributes:
        boot: the random number of this life of the broker.
        file: the number of the file in this life, from 0.
        records: how many records of this life are in earlier files.
        now_ms: when the file began, in ms on the broker's clock. All other records use this clock.
        wall_s: the same moment on the wall clock, in seconds since 1970.
        software: the version of wavebus.
        config: the broker's configuration.
        keys: roles by authorised public key; None if the broker uses no keys.
    """

    boot: int
    file: int
    records: int
    now_ms: float
    wall_s: float
    software: str
    config: BrokerConfig
    keys: dict[str, KeyRole] | None = None


class FrameReceived(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="in"):
    """The broker received a frame.

    Attributes:
        route: ZeroMQ's routing id of the connection; it begins with the sender's name.
        frame: the frame's bytes.
        user: the public key of the connection; empty without keys.
    """

    now_ms: float
    route: bytes
    frame: bytes
    user: str = ""


class FrameRefused(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="refused"):
    """The broker refused a frame unread, because of the frame's size or its sender's rate.

    Frames that are dropped without an answer are not recorded, because they change nothing
    (:meth:`bus._protocol.broker.broker.Broker.admit`).

    Attributes:
        route: ZeroMQ's routing id of the connection; it begins with the sender's name.
        size_bytes: the frame's size.
    """

    now_ms: float
    route: bytes
    size_bytes: int


class KeysChanged(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    """``keys`` (role by public key) replaced the broker's authorised public keys."""

    now_ms: float
    keys: dict[str, KeyRole]


class TimerFired(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="tick"):
    """The broker checked its deadlines. A replay checks them at this record, too."""

    now_ms: float


class FrameSent(msgspec.Struct, frozen=True, array_like=True, tag="out"):
    """The broker sent one frame to the peers of these routes (ZeroMQ's routing ids)."""

    now_ms: float
    routes: tuple[bytes, ...]
    frame: bytes


class BrokerClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The broker shut down in order. Without this record it was killed, or still runs."""

    now_ms: float


class RecordsLost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """``count`` records before this one are missing: they could not be written to disk."""

    now_ms: float
    count: int


Record: TypeAlias = (
    FileBegan
    | FrameReceived
    | FrameRefused
    | KeysChanged
    | TimerFired
    | FrameSent
    | RecordsLost
    | BrokerClosed
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def pack(record: Record) -> bytes:
    """Encodes a record with its length and checksum."""
    body = _encode(record)
    return _PREFIX.pack(MARK, len(body), crc32(body)) + body


def body_span(data: bytes, offset: int) -> tuple[int, int] | None:
    """Returns where the body of the record at ``offset`` begins and ends in ``data``.

    The end may lie beyond ``data``, if the record is torn. Returns None if no record begins at
    ``offset``.
    """
    begin = offset + PREFIX_BYTES
    if begin > len(data):
        return None
    mark, size, _ = _PREFIX.unpack_from(data, offset)
    return (begin, begin + size) if mark == MARK else None


def unpack(data: bytes, offset: int) -> tuple[Record, int] | None:
    """Returns the record at ``offset``, and the offset of the next record.

    Returns None if no valid record begins there: the record is torn or damaged, or there is none.
    """
    span = body_span(data, offset)
    if span is None or span[1] > len(data):
        return None
    body = data[span[0] : span[1]]
    if crc32(body) != _PREFIX.unpack_from(data, offset)[2]:
        return None
    try:
        return _decode(body), span[1]
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
