"""What a journal is made of: records, each with its length and checksum before it.

A file is :data:`MAGIC` and then records, one after the other::

    mark (4 bytes) | length of the body (4, little-endian) | CRC-32 of the body (4) | body

The body is one of the classes below as a MessagePack array that begins with its tag. The
first record of every file is :class:`FileBegan`.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias
from zlib import crc32

import msgspec

from bus.protocol.broker.config import BrokerConfig  # noqa: TC001 - msgspec looks it up
from bus.protocol.core.access import KeyRole  # noqa: TC001 - msgspec looks it up

MAGIC: Final = b"wavebus journal 1\n"
MARK: Final = b"\xf7WB\xf8"
SUFFIX: Final = ".journal"
_PREFIX: Final = struct.Struct("<4sII")
PREFIX_BYTES: Final = _PREFIX.size


class FileBegan(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A file begins. ``boot`` names the broker's life; ``file`` counts its files from 0, and
    ``records`` those records of this life that stand in earlier files.

    ``now_ms`` is the clock of all other records, the broker's own; ``wall_s`` is what the wall
    clock said then, in seconds since 1970. ``config`` has the limits of peers, too; ``keys`` the
    authorised public keys, or None of a broker that has none.
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
    """A frame came from the peer with this route, and was read. ``user``: the public key of its
    connection; empty where there are none."""

    now_ms: float
    route: bytes
    frame: bytes
    user: str = ""


class FrameRefused(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="refused"):
    """A frame came and was not read, for its size or for how many came; its sender is told.

    What is dropped without a word is not recorded: it changes nothing
    (:meth:`bus.protocol.broker.broker.Broker.admit`).
    """

    now_ms: float
    route: bytes
    size_bytes: int


class KeysChanged(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    """Other public keys are authorised from now on."""

    now_ms: float
    keys: dict[str, KeyRole]


class TimerFired(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="tick"):
    """The broker's timer rang."""

    now_ms: float


class FrameSent(msgspec.Struct, frozen=True, array_like=True, tag="out"):
    """A frame goes to the peers with these routes."""

    now_ms: float
    routes: tuple[bytes, ...]
    frame: bytes


class BrokerClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The broker ended in order. Without this one it was killed, or runs still."""

    now_ms: float


class RecordsLost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """So many records before this one are missing: the disk refused them."""

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
    """A record as it stands in the file."""
    body = _encode(record)
    return _PREFIX.pack(MARK, len(body), crc32(body)) + body


def body_span(data: bytes, offset: int) -> tuple[int, int] | None:
    """Where the body of the record at ``offset`` begins and ends, which may be beyond ``data``.

    None where no record begins.
    """
    begin = offset + PREFIX_BYTES
    if begin > len(data):
        return None
    mark, size, _ = _PREFIX.unpack_from(data, offset)
    return (begin, begin + size) if mark == MARK else None


def unpack(data: bytes, offset: int) -> tuple[Record, int] | None:
    """The record at ``offset``, and where the next one begins; None if there is no whole one."""
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
