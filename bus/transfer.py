"""What a transfer backend's two ends say to each other through the bus.

The bus itself carries these as opaque blobs (``TransferInit.params``,
``WeightChunkMeta.handle``): only the backend encodes and decodes them, strictly
and bounded. The bytes of tensors go another way.

A collective backend has its ends in places of one communicator: see :class:`World` and
:class:`Place`.

``gloo``: the trainer keeps a store, where all ends find each other; then each chunk is one
broadcast from rank 0, packed as in a segment of ``shm``.

``shm``: the trainer owns a ring of POSIX shared memory segments on one host. A
chunk is packed into one segment, every tensor at a multiple of
:data:`ALIGN_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

SHM_FOLDER: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
SHM_PREFIX: Final = "wavebus-"
ALIGN_BYTES: Final = 64

SegmentName = Annotated[str, Meta(max_length=128, pattern=r"^wavebus-[A-Za-z0-9._-]+\Z")]
Offset = Annotated[int, Meta(ge=0)]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """What a sender needs to know of the communicator that it makes; it is rank 0.

    ``number`` is 0 and ``size`` 1 for a backend without collectives. ``address`` is this
    host's, as those see it who are reached the way that the broker is.
    """

    number: int
    size: int
    address: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine stands in a communicator. ``rank`` is its first worker's, and each
    worker's own where a receiver gets it."""

    communicator: int
    world_size: int
    rank: int

    def of_worker(self, index: int) -> Place:
        """The place of an engine's worker."""
        return Place(self.communicator, self.world_size, self.rank + index)


# Of a backend without collectives.
ALONE: Final = World(0, 1, "")
NO_PLACE: Final = Place(0, 1, 0)


@dataclass(frozen=True, slots=True)
class GlooInit:
    """The trainer's store, the room for one chunk, and how long one chunk may take."""

    host: Annotated[str, Meta(min_length=1, max_length=256)]
    port: Annotated[int, Meta(gt=0, lt=65536)]
    chunk_bytes: Annotated[int, Meta(gt=0)]
    timeout_ms: Annotated[int, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class GlooChunk:
    """How many bytes are broadcast: every tensor at a multiple of :data:`ALIGN_BYTES`."""

    size_bytes: Offset


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


def aligned(size_bytes: int) -> int:
    """The room that a tensor takes in a packed chunk."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def encode(params: object) -> bytes:
    """Encode one of the classes above as a blob."""
    return msgspec.msgpack.encode(params)


def decode(blob: bytes, type_: type[T]) -> T:
    """Decode a blob.

    Raises:
        ValueError: names the field that is wrong.
    """
    try:
        return msgspec.msgpack.decode(blob, type=type_)
    except msgspec.DecodeError as error:
        raise ValueError(f"{type_.__name__}: {error}") from error
