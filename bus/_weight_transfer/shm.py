"""Transfers weights through POSIX shared memory on one host: both ends.

Packed, the trainer creates a ring of segments and the engines map them. Then the names are removed
at once, so the memory lives exactly as long as a process maps it, even if one is killed. Before
that, a segment of a dead owner is recognised by the advisory lock that the owner no longer has; the
next trainer removes it. A chunk's tensors are views of the mapping, without a copy.

Unpacked, there is no ring. Engines read tensors in memory of :func:`allocate` where they are, so
these must stay unchanged until the chunk is applied. Other tensors are copied into shared memory
that is made for the chunk. That memory has no name (``memfd``): nothing is left when the last
tensor there and the last mapping are gone. Engines open it through the trainer's descriptor, with a
private mapping, so that their writes never reach the trainer. They keep a mapping as long as each
chunk has tensors there, because mapping costs as much as copying.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from typing_extensions import override  # torch requires it

from bus import _locked_paths as locked_paths
from bus._locked_paths import SHM_PREFIX
from bus._weight_transfer.base import Receiver, Sender
from bus._weight_transfer.formats import (
    SHM_FOLDER,
    LentTensors,
    PackedChunk,
    ShmInit,
    ShmMemory,
    aligned,
    decode_received,
    encode,
    transfer_failed,
)
from bus._weight_transfer.packing import ViewCache, check_lent, lend, lent_views, pack
from bus.errors import WavebusError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import RankAssignment, World
    from bus.errors import EngineError


class _SharedMapping(mmap.mmap):
    """Shared memory of this process. It is freed with the last tensor that lies in it."""

    descriptor: int
    device: int
    inode: int


# Mappings of this process by their address, as a tensor's storage has it.
_mappings: Final[weakref.WeakValueDictionary[int, _SharedMapping]] = weakref.WeakValueDictionary()


def allocate(size_bytes: int) -> torch.Tensor:
    """Allocates memory from which engines of this host can read without a copy.

    Args:
        size_bytes: the size in bytes; at least one byte is allocated.

    Returns:
        A uint8 tensor of one dimension.

    Raises:
        WavebusError: there is not enough memory.
    """
    size_bytes = max(size_bytes, 1)
    descriptor = os.memfd_create("wavebus", os.MFD_CLOEXEC)
    try:
        # Reserve the memory now: a write to memory that is missing later is a SIGBUS.
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory = _SharedMapping(descriptor, size_bytes)
    except OSError as error:
        os.close(descriptor)
        raise WavebusError(
            f"can't have {size_bytes} bytes of shared memory: {error.strerror}"
        ) from error
    status = os.fstat(descriptor)
    memory.descriptor, memory.device, memory.inode = descriptor, status.st_dev, status.st_ino
    weakref.finalize(memory, os.close, descriptor)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _mappings[tensor.data_ptr()] = memory
    return tensor


def is_shared(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor lies in memory of :func:`allocate`."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _mappings


def locate(tensor: torch.Tensor) -> tuple[ShmMemory, int]:
    """Returns the shared memory of a tensor, and the tensor's offset there in bytes.

    Args:
        tensor: one that :func:`is_shared`.
    """
    base = tensor.untyped_storage().data_ptr()
    memory = _mappings[base]
    found = ShmMemory(os.getpid(), memory.descriptor, memory.device, memory.inode, len(memory))
    return found, tensor.data_ptr() - base


class ShmSender(Sender):
    """Offers chunks in shared memory. One is written while engines load the one before."""

    can_send_unpacked: ClassVar[bool] = True

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._lent: dict[int, list[torch.Tensor]] = {}

    @override
    def open(self, chunk_bytes: int, world: World) -> bytes:
        self.close()
        sweep()
        if not self.packed:
            return encode(ShmInit((), 0))
        size_bytes = aligned(max(chunk_bytes, 1))
        try:
            for _ in range(self.prefetch_depth):
                self._segments.append(_Segment(size_bytes))
        except OSError as error:
            self.close()
            raise WavebusError(
                f"can't create {self.prefetch_depth} shared memory segments of {size_bytes} bytes: "
                f"{error.strerror}; lower chunk_bytes or enlarge {SHM_FOLDER}"
            ) from error
        return encode(ShmInit(tuple(s.name for s in self._segments), size_bytes))

    @override
    def on_opened(self) -> None:
        for segment in self._segments:
            segment.unlink()

    @override
    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        if not self.packed:
            return self._lend(seq, tensors)
        index = seq % self.prefetch_depth
        offsets = pack(self._segments[index].memory, tensors)
        return encode(PackedChunk(index, tuple(offsets[:-1])))

    @override
    def on_taken(self, seq: int) -> None:
        self._lent.pop(seq, None)

    @override
    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments = []
        self._lent = {}

    def _lend(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        if not seq:  # drop what a failed update has left
            self._lent = {}
        lent = self._lent[seq] = _in_shared_memory(tensors)
        return lend(lent, locate)


def _in_shared_memory(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors contiguous and in shared memory, copied there if needed."""
    lent = list(tensors)
    others = [
        place
        for place, tensor in enumerate(tensors)
        if tensor.numel() and not (tensor.is_contiguous() and is_shared(tensor))
    ]
    if others:
        sizes_bytes = [lent[place].numel() * lent[place].element_size() for place in others]
        memory = allocate(sum(map(aligned, sizes_bytes)))
        starts = pack(memory, [lent[place] for place in others])
        for place, start, size_bytes in zip(others, starts, sizes_bytes, strict=False):
            whole = memory[start : start + size_bytes]
            lent[place] = whole.view(lent[place].dtype).view(lent[place].shape)
    return lent


class _Segment:
    """A shared memory segment: created exclusively, locked by its owner, mapped as a whole."""

    def __init__(self, size_bytes: int) -> None:
        while True:
            self.name = f"{SHM_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
            self._path = Path(SHM_FOLDER) / self.name
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)  # another trainer swept it before it was locked
        self._linked = True
        try:
            # Reserve the memory now: a write to a sparse segment of a full file system is a SIGBUS.
            os.posix_fallocate(self._descriptor, 0, size_bytes)
            self.memory = torch.frombuffer(
                mmap.mmap(self._descriptor, size_bytes), dtype=torch.uint8
            )
        except BaseException:
            self.close()
            raise

    def unlink(self) -> None:
        if self._linked:
            self._path.unlink(missing_ok=True)
            self._linked = False

    def close(self) -> None:
        self.unlink()
        os.close(self._descriptor)


def sweep(folder: Path = Path(SHM_FOLDER)) -> list[str]:
    """Removes segments whose process has died.

    Args:
        folder: where to look.

    Returns:
        The names that were removed.
    """
    # Folders with that prefix have the shared pages of engine cores.
    segments = (path for path in folder.glob(f"{SHM_PREFIX}*") if path.is_file())
    return locked_paths.sweep(segments, lambda left: left.unlink(missing_ok=True))


class ShmReceiver(Receiver):
    """Reads chunks in the trainer's ring of segments, or in memory that the trainer lends."""

    is_blocking = False

    def __init__(self) -> None:
        self._segments: list[torch.Tensor] = []
        self._views = ViewCache()
        self._lends = False
        self._lent: dict[ShmMemory, torch.Tensor] = {}

    @override
    def open(self, params: bytes, place: RankAssignment) -> None:
        init = decode_received(params, ShmInit)
        if bool(init.segments) != bool(init.segment_bytes):
            raise transfer_failed(
                f"segment_bytes: {init.segment_bytes} of {len(init.segments)} segments"
            )
        self._lent = {}
        self._views.clear()
        self._segments = [_map_segment(name, init.segment_bytes) for name in init.segments]
        self._lends = not init.segments
        self.room_bytes = init.segment_bytes or None

    @override
    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        if self._lends:
            return self._receive_lent(tensors, decode_received(handle, LentTensors[ShmMemory]))
        chunk = decode_received(handle, PackedChunk)
        if chunk.buffer >= len(self._segments):
            raise transfer_failed(
                f"the chunk is in segment {chunk.buffer} of the sender's shared memory, and this "
                f"engine has opened {len(self._segments)} segments: open the transfer again"
            )
        return self._views.get(self._segments[chunk.buffer], chunk.offsets_bytes, tensors)

    @override
    def close(self) -> None:
        self._segments = []
        self._views.clear()
        self._lends = False
        self._lent = {}

    def _receive_lent(
        self, tensors: tuple[TensorMeta, ...], lent: LentTensors[ShmMemory]
    ) -> list[tuple[str, torch.Tensor]]:
        check_lent(lent, tensors)
        if lent.memories:
            known = self._lent
            self._lent = {}
            for memory in lent.memories:
                mapped = known.get(memory)
                self._lent[memory] = _map_lent(memory) if mapped is None else mapped
        memories = [self._lent[memory] for memory in lent.memories]
        return lent_views(memories, lent, tensors, self.device)


def _map_segment(name: str, size_bytes: int) -> torch.Tensor:
    """Maps the whole segment as a uint8 tensor, until its last view is gone."""
    try:
        descriptor = os.open(os.path.join(SHM_FOLDER, name), os.O_RDWR | os.O_CLOEXEC)  # noqa: PTH118
    except OSError as error:
        raise transfer_failed(
            f"can't open shared memory {name}: {error.strerror}; trainer and engine must "
            "run on one host, as one user; gloo and nccl reach engines on other hosts"
        ) from error
    try:
        actual_bytes = os.fstat(descriptor).st_size
        if actual_bytes != size_bytes:
            raise transfer_failed(f"{name} has {actual_bytes} bytes, expected {size_bytes}")
        mapping = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _map_lent(memory: ShmMemory) -> torch.Tensor:
    """Maps the trainer's memory privately, as a uint8 tensor of one dimension.

    The mapping shows the trainer's later writes. Writes here stay in this process.
    """
    path = f"/proc/{memory.pid}/fd/{memory.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _mapping_failed(f"can't open {path}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        expected = (memory.device, memory.inode, memory.size_bytes)
        if (found.st_dev, found.st_ino, found.st_size) != expected:
            raise _mapping_failed(f"{path} is not the memory that the trainer lends")
        mapping = mmap.mmap(descriptor, memory.size_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _mapping_failed(why: str) -> EngineError:
    return transfer_failed(
        f"{why}; trainer and engine must run on one host, as one user, and see each other's "
        "processes (containers: one PID namespace), or the trainer sends with packed=True"
    )
