"""What a transfer backend's two ends say to each other through the bus.

The bus itself carries these as opaque blobs (``TransferInit.params``,
``WeightChunkMeta.handle``): only the backend encodes and decodes them, strictly
and bounded. The bytes of tensors go another way.

``shm``: the trainer owns a ring of POSIX shared memory segments on one host. A
chunk is packed into one segment, every tensor at a multiple of
:data:`SHM_ALIGN_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

SHM_FOLDER: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
SHM_PREFIX: Final = "wavebus-"
SHM_ALIGN_BYTES: Final = 64

SegmentName = Annotated[str, Meta(max_length=128, pattern=r"^wavebus-[A-Za-z0-9._-]+\Z")]
Offset = Annotated[int, Meta(ge=0)]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShmInit:
    """The ring: names of the segments (files of :data:`SHM_FOLDER`), all of one size."""

    segments: Annotated[tuple[SegmentName, ...], Meta(min_length=1, max_length=16)]
    segment_bytes: Annotated[int, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class ShmChunk:
    """Where a chunk lies: index into the ring, and each tensor's offset in bytes."""

    segment: Offset
    offsets_bytes: Annotated[tuple[Offset, ...], Meta(max_length=200_000)]


def pack(params: object) -> bytes:
    """Encode one of the classes above as a blob."""
    return msgspec.msgpack.encode(params)


def unpack(blob: bytes, type_: type[T]) -> T:
    """Decode a blob.

    Raises:
        ValueError: names the field that is wrong.
    """
    try:
        return msgspec.msgpack.decode(blob, type=type_)
    except msgspec.DecodeError as error:
        raise ValueError(f"{type_.__name__}: {error}") from error
