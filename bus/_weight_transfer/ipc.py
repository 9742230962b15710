"""Lends the trainer's GPU memory to engines on the same GPU: both ends.

Packed, chunks are copied into buffers that engines map as long as the transport is open. Unpacked,
nothing is copied: each chunk says where its tensors lie, and engines map that memory for that
chunk. The tensors must then be on that GPU, and stay unchanged until the chunk is applied.
Afterwards the trainer may free them.

CUDA's order of events does not cross processes. So a chunk is announced only when the GPU has
finished writing it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from typing_extensions import override  # torch requires it

from bus._weight_transfer import cuda
from bus._weight_transfer.base import Receiver, Sender
from bus._weight_transfer.cuda import resolve_gpu, synchronize
from bus._weight_transfer.formats import (
    IpcInit,
    IpcMemory,
    LentTensors,
    PackedChunk,
    decode_received,
    encode,
    transfer_failed,
)
from bus._weight_transfer.packing import check_lent, lend, lent_views, pack, views_of
from bus.errors import UsageError, WavebusError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import RankAssignment, World
    from bus._weight_transfer.packing import ReceivedChunk


class _Mapped(NamedTuple):
    """Memory of the trainer's GPU in this process: its address, and its bytes."""

    pointer: int
    memory: torch.Tensor


class _Buffer(NamedTuple):
    """A buffer on the trainer's GPU: its address, its bytes, and how engines open it."""

    pointer: int
    memory: torch.Tensor
    shared: IpcMemory


class IpcSender(Sender):
    """Lends chunks in GPU memory. One is packed while engines load the one before."""

    can_send_unpacked: ClassVar[bool] = True

    def __init__(self) -> None:
        self._gpu = torch.device("cpu")
        self._buffers: list[_Buffer] = []
        # Buffers of an earlier opening. Engines map them until they have opened the next.
        self._retired: list[_Buffer] = []
        self._lent: dict[int, list[torch.Tensor]] = {}

    @override
    def open(self, chunk_bytes: int, world: World) -> bytes:
        self._retired += self._buffers
        self._buffers = []
        self._gpu = resolve_gpu(self.device)
        room = max(chunk_bytes, 1) if self.packed else 0
        try:
            with cuda.driver_on(self._gpu) as driver:
                for _ in range(self.prefetch_depth if self.packed else 0):
                    self._buffers.append(_allocate(driver, room, self._gpu))
        except cuda.CudaError as error:
            self.close()
            raise WavebusError(
                f"{self._gpu} can't lend {self.prefetch_depth} buffers of {room} bytes: {error}; "
                "lower chunk_bytes or buffers, or send with packed=False"
            ) from error
        shared = tuple(buffer.shared for buffer in self._buffers)
        return encode(IpcInit(cuda.device_uuid(self._gpu), shared, room))

    @override
    def on_opened(self) -> None:
        self._retired = _free_buffers(self._retired, self._gpu)

    @override
    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        if not self.packed:
            return self._lend(seq, tensors)
        index = seq % self.prefetch_depth
        with torch.cuda.device(self._gpu):
            offsets = pack(self._buffers[index].memory, tensors)
            torch.cuda.synchronize(self._gpu)
        return encode(PackedChunk(index, tuple(offsets[:-1])))

    @override
    def on_taken(self, seq: int) -> None:
        self._lent.pop(seq, None)

    def close(self) -> None:
        """Frees the memory at once, even if engines have it mapped."""
        self._retired = _free_buffers([*self._retired, *self._buffers], self._gpu)
        self._buffers = []
        self._lent = {}

    def _lend(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        for tensor in tensors:
            if tensor.device != self._gpu:
                raise UsageError(
                    f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}, and what ipc "
                    f"lends must be on {self._gpu}: send with packed=True, which copies"
                )
        if not seq:  # drop what a failed update has left
            self._lent = {}
        whole = [tensor.contiguous() for tensor in tensors]
        self._lent[seq] = whole
        try:
            with cuda.driver_on(self._gpu) as driver:
                return lend(whole, functools.partial(_locate, driver, {}))
        except cuda.CudaError as error:
            raise WavebusError(
                f"a tensor's memory can't be lent ({error}), as that of torch's expandable "
                "segments, say: send with packed=True"
            ) from error


def _locate(
    driver: cuda.Driver, known: dict[int, IpcMemory], tensor: torch.Tensor
) -> tuple[IpcMemory, int]:
    """Returns the allocation in which a tensor lies, and its offset there; adds it to ``known``."""
    base, size_bytes = driver.extent(tensor.data_ptr())
    if base not in known:
        known[base] = IpcMemory(driver.export(base), size_bytes)
    return known[base], tensor.data_ptr() - base


def _allocate(driver: cuda.Driver, size_bytes: int, device: torch.device) -> _Buffer:
    pointer = driver.allocate(size_bytes)
    try:
        shared = IpcMemory(driver.export(pointer), driver.extent(pointer)[1])
    except cuda.CudaError:
        driver.free(pointer)
        raise
    return _Buffer(pointer, cuda.as_tensor(pointer, size_bytes, device), shared)


def _free_buffers(buffers: Sequence[_Buffer], device: torch.device) -> list[_Buffer]:
    """Frees buffers, and returns an empty list in their place."""
    if buffers:
        with cuda.driver_on(device) as driver:
            for buffer in buffers:
                driver.free(buffer.pointer)
    return []


class IpcReceiver(Receiver):
    """Receives tensors as views of the trainer's memory, without a copy."""

    is_lasting = False

    def __init__(self) -> None:
        self._packed = False
        self._open = False
        self._buffers: list[_Mapped] = []
        self._chunk: list[_Mapped] = []

    @override
    def open(self, params: bytes, place: RankAssignment) -> None:
        init = decode_received(params, IpcInit)
        self.close()
        self._check(init)
        short = [memory for memory in init.buffers if memory.size_bytes < init.buffer_bytes]
        if short:
            raise transfer_failed(
                f"a buffer of {short[0].size_bytes} bytes, which should have {init.buffer_bytes}"
            )
        self._buffers = self._map(init.buffers)
        self._packed = bool(init.buffers)
        self._open = True
        self.room_bytes = init.buffer_bytes if init.buffers else None

    @override
    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        self._require_open()
        if self._packed:
            chunk = decode_received(handle, PackedChunk)
            return views_of(self._buffer(chunk), chunk.offsets_bytes, tensors)
        return self._lent(tensors, handle)

    @override
    def receive_into(
        self, tensors: tuple[TensorMeta, ...], handle: bytes, into: ReceivedChunk
    ) -> bool:
        self._require_open()
        if self._packed:
            chunk = decode_received(handle, PackedChunk)
            buffer, size_bytes = self._buffer(chunk), into.memory.numel()
            if chunk.offsets_bytes != into.offsets_bytes or size_bytes > buffer.numel():
                return False
            into.memory.copy_(buffer[:size_bytes])
        else:
            for (_, target), (_, source) in zip(into, self._lent(tensors, handle), strict=True):
                target.copy_(source)
        synchronize(self.device)
        return True

    def release(self) -> None:
        """Waits for copies that still read the chunk, because the trainer writes there next."""
        if self._chunk:
            self._unmap_chunk()
        elif self._buffers:
            synchronize(self.device)

    @override
    def close(self) -> None:
        self._open = False
        self._unmap_chunk()
        self._buffers = self._unmap(self._buffers)

    def _check(self, init: IpcInit) -> None:
        if self.device.type != "cuda":
            raise transfer_failed(
                f"ipc needs an engine on the trainer's GPU, and this one's weights are on "
                f"{self.device}: use shm or gloo"
            )
        own = cuda.device_uuid(self.device)
        if own != init.gpu:
            raise transfer_failed(
                f"the trainer lends memory of GPU {init.gpu}, and this worker is on GPU {own}: "
                "use nccl between GPUs"
            )

    def _require_open(self) -> None:
        if not self._open:
            raise transfer_failed("the trainer's memory is not mapped: open it first")

    def _buffer(self, chunk: PackedChunk) -> torch.Tensor:
        if chunk.buffer >= len(self._buffers):
            raise transfer_failed(f"buffer {chunk.buffer} of {len(self._buffers)}")
        return self._buffers[chunk.buffer].memory

    def _lent(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        """Returns a chunk's tensors in the trainer's memory, mapped until :meth:`release`."""
        lent = decode_received(handle, LentTensors[IpcMemory])
        check_lent(lent, tensors)
        self._unmap_chunk()
        self._chunk = self._map(lent.memories)
        try:
            memories = [mapped.memory for mapped in self._chunk]
            return lent_views(memories, lent, tensors, self.device)
        except BaseException:
            self._unmap_chunk()
            raise

    def _map(self, memories: Sequence[IpcMemory]) -> list[_Mapped]:
        mapped: list[_Mapped] = []
        if not memories:
            return mapped
        try:
            with cuda.driver_on(self.device) as driver:
                for memory in memories:
                    pointer = driver.open(memory.handle)
                    view = cuda.as_tensor(pointer, memory.size_bytes, self.device)
                    mapped.append(_Mapped(pointer, view))
        except cuda.CudaError as error:
            self._unmap(mapped)
            raise transfer_failed(
                f"can't map the trainer's memory: {error}; trainer and engine must be different "
                "processes of one host, which see each other (containers: --ipc=host)"
            ) from error
        return mapped

    def _unmap_chunk(self) -> None:
        self._chunk = self._unmap(self._chunk)

    def _unmap(self, mapped: Sequence[_Mapped]) -> list[_Mapped]:
        """Unmaps memory when nothing reads it any more; returns an empty list."""
        if mapped:
            with cuda.driver_on(self.device) as driver:
                for each in mapped:
                    driver.close(each.pointer)
        return []
