"""Messages between the two ends of a transfer backend.

The bus carries them as opaque blobs (``TransferInit.params``, ``WeightChunkMeta.handle``). Only the
backend encodes and decodes them, strictly and bounded. Tensors travel another way.

- ``shm``: the trainer owns a ring of POSIX shared memory segments on one host. A chunk is packed
  into one segment, every tensor at a multiple of :data:`ALIGN_BYTES`. Unpacked, there is no ring:
  tensors lie in unnamed shared memory, which engines find through the trainer's descriptors.
- ``gloo``: the trainer runs a store, where all ends meet. Each chunk is one broadcast from rank 0,
  packed as over ``shm``.
- ``nccl``: the same between GPUs. Unpacked, each tensor is broadcast by itself.
- ``ipc``: trainer and workers share a GPU. The trainer lends buffers into which chunks are packed,
  or, unpacked, the tensors' own memory, by CUDA handles.

The module loads no torch, so the rest of the bus may import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Generic, TypeVar

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
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
MemoryHandle = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]

T = TypeVar("T")
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class GlooInit:
    """Where the ends of a ``gloo`` communicator meet, and what it carries.

    Attributes:
        host: the host of the trainer's store and entry barrier.
        port: the store's port.
        barrier_port: the entry barrier's port.
        token: the secret that the entry barrier asks for.
        chunk_bytes: size of one buffer in bytes.
        buffers: how many buffers each end has.
        timeout_ms: how long meeting, or one chunk, may take, in ms.
    """

    host: Host
    port: Port
    barrier_port: Port
    token: Token
    chunk_bytes: Size
    buffers: Buffers
    timeout_ms: Size


@dataclass(frozen=True, slots=True)
class NcclInit(GlooInit):
    """Where the ends of an ``nccl`` communicator meet. All need the same version of NCCL.

    Attributes:
        chunk_bytes: size of one buffer in bytes; 0 if chunks are sent unpacked.
        buffers: how many chunks may be in flight.
        timeout_ms: how long meeting may take, in ms.
        version: version of the trainer's NCCL.
    """

    chunk_bytes: Offset
    version: Annotated[str, Meta(max_length=32)]


@dataclass(frozen=True, slots=True)
class BroadcastChunk:
    """The handle of a chunk over ``gloo`` or ``nccl``.

    Attributes:
        size_bytes: size of the broadcast. Packed, every tensor is at a multiple of
            :data:`ALIGN_BYTES`; unpacked, it is the sum of the tensors' sizes.
    """

    size_bytes: Offset


@dataclass(frozen=True, slots=True)
class ShmInit:
    """The trainer's ring of shared memory segments; empty if the trainer sends unpacked.

    Attributes:
        segments: names of the segments, files in :data:`SHM_FOLDER`.
        segment_bytes: size of each segment in bytes; 0 without segments.
    """

    segments: Annotated[tuple[SegmentName, ...], Meta(max_length=16)]
    segment_bytes: Offset


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """The handle of a packed chunk over ``shm`` or ``ipc``.

    Attributes:
        buffer: index of the trainer's segment or buffer.
        offsets_bytes: where each tensor begins in it, in bytes.
    """

    buffer: Offset
    offsets_bytes: Offsets


@dataclass(frozen=True, slots=True)
class ShmMemory:
    """Unnamed shared memory of a process, and how to recognise it.

    Attributes:
        pid: the process that lends the memory.
        descriptor: the process's file descriptor of the memory.
        device: device number of the file, to recognise it.
        inode: inode number of the file, to recognise it.
        size_bytes: the memory's size in bytes.
    """

    pid: Size
    descriptor: Offset
    device: Offset
    inode: Offset
    size_bytes: Size


@dataclass(frozen=True, slots=True)
class IpcMemory:
    """An allocation on the trainer's GPU.

    Attributes:
        handle: CUDA's handle of the allocation (``cudaIpcMemHandle_t``).
        size_bytes: the allocation's size in bytes.
    """

    handle: MemoryHandle
    size_bytes: Size


@dataclass(frozen=True, slots=True)
class IpcInit:
    """The GPU that both ends share, and the trainer's buffers there.

    Attributes:
        gpu: the GPU's UUID.
        buffers: the buffers; none if chunks are sent unpacked.
        buffer_bytes: size of each buffer in bytes.
    """

    gpu: Uuid
    buffers: Annotated[tuple[IpcMemory, ...], Meta(max_length=16)]
    buffer_bytes: Offset


@dataclass(frozen=True, slots=True)
class LentTensors(Generic[M]):
    """The handle of an unpacked chunk over ``shm`` or ``ipc``. All tensors are contiguous.

    Attributes:
        memories: the memories in which tensors lie.
        memory_of: for each tensor, the index of its memory; meaningless for an empty tensor.
        offsets_bytes: for each tensor, where it begins in its memory, in bytes.
    """

    memories: Annotated[tuple[M, ...], Meta(max_length=MAX_TENSORS)]
    memory_of: Offsets
    offsets_bytes: Offsets


def aligned(size_bytes: int) -> int:
    """Returns how many bytes a tensor takes in a packed chunk.

    Args:
        size_bytes: the tensor's own size in bytes.
    """
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def encode(params: object) -> bytes:
    """Returns params or a handle as a blob.

    Args:
        params: an instance of a dataclass, such as those of this module.
    """
    return msgspec.msgpack.encode(params)


def decode(blob: bytes, type_: type[T]) -> T:
    """Returns what a blob holds.

    Args:
        blob: what :func:`encode` returned.
        type_: the dataclass that it must be.

    Raises:
        ValueError: names the wrong field.
    """
    try:
        return msgspec.msgpack.decode(blob, type=type_)
    except msgspec.DecodeError as error:
        raise ValueError(f"{type_.__name__}: {error}") from error


def decode_received(blob: bytes, type_: type[T]) -> T:
    """Decodes a blob from a sender, for a receiver.

    Args:
        blob: what :func:`encode` returned.
        type_: the dataclass that it must be.

    Raises:
        EngineError: code ``transfer_failed``, with the wrong field.
    """
    try:
        return decode(blob, type_)
    except ValueError as error:
        raise transfer_failed(str(error)) from error


def transfer_failed(detail: str, *, tensor: str = "") -> EngineError:
    """Makes the error of a transport, with the code ``transfer_failed``.

    Args:
        detail: what was expected, what was found, and what to do.
        tensor: name of the tensor concerned, if there is one.
    """
    return EngineError(detail, code=NackCode.TRANSFER_FAILED, tensor=tensor)
