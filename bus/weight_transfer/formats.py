"""Messages between the two ends of a transfer backend.

The bus carries them as opaque blobs (``TransferInit.params``, ``WeightChunkMeta.handle``). Only the
backend encodes and decodes them, strictly and bounded. The bytes of tensors travel another way.

``gloo``: the trainer runs a store, where all ends find each other. Each chunk is one broadcast from
rank 0, packed as in a segment of ``shm``.

``nccl``: the same between GPUs. Unpacked, each tensor is broadcast by itself.

``ipc``: trainer and workers share a GPU. The trainer lends its memory there, by CUDA's own handles:
buffers into which chunks are packed, or, unpacked, the tensors' own memory.

``shm``: the trainer owns a ring of POSIX shared memory segments on one host. A chunk is packed into
one segment, every tensor at a multiple of :data:`ALIGN_BYTES`. Unpacked, there is no ring: tensors
lie in shared memory already, which has no name and is found through the trainer's descriptors.

The module loads no torch, so the rest of the bus may import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from bus.errors import EngineError
from bus.messages import NackCode

HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE


SHM_FOLDER: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux


ALIGN_BYTES: Final = 64


SegmentName = Annotated[str, Meta(max_length=128, pattern=r"^wavebus-[A-Za-z0-9._-]+\Z")]


Offset = Annotated[int, Meta(ge=0)]


Size = Annotated[int, Meta(gt=0)]


Buffers = Annotated[int, Meta(ge=1, le=16)]


MAX_TENSORS: Final = 200_000


Offsets = Annotated[tuple[Offset, ...], Meta(max_length=MAX_TENSORS)]


Host = Annotated[str, Meta(min_length=1, max_length=256)]


Port = Annotated[int, Meta(gt=0, lt=65536)]


Uuid = Annotated[str, Meta(pattern=r"^[0-9A-Za-z-]{1,64}\Z")]


MemoryHandle = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GlooInit:
    """The trainer's store, the room for one chunk and for how many, and how long one may take."""

    host: Host
    port: Port
    chunk_bytes: Size
    buffers: Buffers
    timeout_ms: Size


@dataclass(frozen=True, slots=True)
class GlooChunk:
    """How many bytes are broadcast: every tensor at a multiple of :data:`ALIGN_BYTES`."""

    size_bytes: Offset


@dataclass(frozen=True, slots=True)
class ShmInit:
    """The ring: names of the segments (files of :data:`SHM_FOLDER`), all of one size; none, and no
    size, where tensors stay where they are."""

    segments: Annotated[tuple[SegmentName, ...], Meta(max_length=16)]
    segment_bytes: Offset


@dataclass(frozen=True, slots=True)
class ShmChunk:
    """Where a chunk lies: index into the ring, and each tensor's offset in bytes."""

    segment: Offset
    offsets_bytes: Offsets


@dataclass(frozen=True, slots=True)
class ShmMemory:
    """Shared memory without a name: a process's descriptor of it, and what tells that it is this
    memory, and not another's that has the same numbers where they are looked up."""

    pid: Size
    descriptor: Offset
    device: Offset
    inode: Offset
    size_bytes: Size


@dataclass(frozen=True, slots=True)
class ShmTensors:
    """Where the tensors of a chunk are: the memories, and for each tensor in which of them it
    lies, and how far from its beginning. They are contiguous. What an empty one says is nothing."""

    memories: Annotated[tuple[ShmMemory, ...], Meta(max_length=MAX_TENSORS)]
    memory_of: Offsets
    offsets_bytes: Offsets


@dataclass(frozen=True, slots=True)
class NcclInit:
    """The trainer's store, how chunks come, and how long meeting may take.

    ``chunk_bytes`` is the room for a packed chunk, 0 where tensors come one by one; ``buffers``:
    for how many chunks. ``version`` is that of the trainer's NCCL, which must be every end's.
    """

    host: Host
    port: Port
    chunk_bytes: Offset
    buffers: Buffers
    timeout_ms: Size
    version: Annotated[str, Meta(max_length=32)]


@dataclass(frozen=True, slots=True)
class NcclChunk:
    """How many bytes are broadcast: packed, every tensor at a multiple of :data:`ALIGN_BYTES`;
    unpacked, what the tensors have."""

    size_bytes: Offset


@dataclass(frozen=True, slots=True)
class IpcMemory:
    """A whole allocation on the trainer's GPU: CUDA's handle (``cudaIpcMemHandle_t``), its size."""

    handle: MemoryHandle
    size_bytes: Size


@dataclass(frozen=True, slots=True)
class IpcInit:
    """The GPU that both ends share, and the buffers there, each of ``buffer_bytes``; none, where
    tensors stay where they are."""

    gpu: Uuid
    buffers: Annotated[tuple[IpcMemory, ...], Meta(max_length=16)]
    buffer_bytes: Offset


@dataclass(frozen=True, slots=True)
class IpcChunk:
    """Where a packed chunk lies: index of the buffer, and each tensor's offset in bytes."""

    buffer: Offset
    offsets_bytes: Offsets


@dataclass(frozen=True, slots=True)
class IpcTensors:
    """Where the tensors of a chunk are: the allocations, and for each tensor in which of them it
    lies, and how far from its beginning. They are contiguous. What an empty one says is nothing."""

    memories: Annotated[tuple[IpcMemory, ...], Meta(max_length=MAX_TENSORS)]
    memory_of: Offsets
    offsets_bytes: Offsets


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


def decode_received(blob: bytes, type_: type[T]) -> T:
    """What a sender's blob says.

    Raises:
        EngineError: code ``transfer_failed``, with the field that is wrong.
    """
    try:
        return decode(blob, type_)
    except ValueError as error:
        raise transfer_failed(str(error)) from error


def transfer_failed(detail: str, *, tensor: str = "") -> EngineError:
    """The error of a transport."""
    return EngineError(detail, code=NackCode.TRANSFER_FAILED, tensor=tensor)
