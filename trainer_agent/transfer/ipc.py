"""Lend engines on the same GPU this trainer's memory there.

Packed, chunks are copied into buffers that engines have mapped. Unpacked, nothing is copied: each
chunk tells where its tensors lie, and engines map that while they take them. So those must be on
that GPU, and stay as they are until the chunk is applied.

Nothing of CUDA's order of events crosses processes: a chunk is announced when the GPU is done with
what made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from bus import cuda
from bus.errors import UsageError, WavebusError
from bus.transfer import IpcChunk, IpcInit, IpcMemory, IpcTensors, encode
from trainer_agent.transfer.base import Sender, gpu, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.transfer import World


@dataclass(frozen=True, slots=True)
class _Buffer:
    pointer: int
    memory: torch.Tensor
    shared: IpcMemory


class IpcSender(Sender):
    """One chunk is packed while engines load the one before."""

    sends_unpacked: ClassVar[bool] = True

    def __init__(self) -> None:
        self._gpu = torch.device("cpu")
        self._buffers: list[_Buffer] = []
        # Of an opening before: engines have it mapped until they have opened the next.
        self._retired: list[_Buffer] = []
        self._lent: dict[int, list[torch.Tensor]] = {}

    def open(self, chunk_bytes: int, world: World) -> bytes:  # noqa: ARG002 - no collective
        self._retired += self._buffers
        self._buffers = []
        self._gpu = gpu(self.device)
        room = max(chunk_bytes, 1) if self.packed else 0
        try:
            with cuda.working_on(torch, self._gpu) as driver:
                for _ in range(self.depth if self.packed else 0):
                    self._buffers.append(_allocate(driver, room, self._gpu))
        except cuda.CudaError as error:
            self.close()
            raise WavebusError(
                f"{self._gpu} can't lend {self.depth} buffers of {room} bytes: {error}; lower "
                "chunk_bytes or buffers, or send with packed=False"
            ) from error
        shared = tuple(buffer.shared for buffer in self._buffers)
        return encode(IpcInit(cuda.device_uuid(torch, self._gpu), shared, room))

    def opened(self) -> None:
        self._retired = _freed(self._retired, self._gpu)

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        if not self.packed:
            return self._lend(seq, tensors)
        index = seq % self.depth
        with torch.cuda.device(self._gpu):
            offsets = pack(self._buffers[index].memory, tensors)
            torch.cuda.synchronize(self._gpu)
        return encode(IpcChunk(index, tuple(offsets[:-1])))

    def taken(self, seq: int) -> None:
        self._lent.pop(seq, None)

    def close(self) -> None:
        """The memory is free at once, whoever of the engines is still there."""
        self._retired = _freed([*self._retired, *self._buffers], self._gpu)
        self._buffers = []
        self._lent = {}

    def _lend(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        for tensor in tensors:
            if tensor.device != self._gpu:
                raise UsageError(
                    f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}, and what ipc "
                    f"lends must be on {self._gpu}: send with packed=True, which copies"
                )
        if not seq:  # what an update that broke off has left
            self._lent = {}
        whole = [tensor.contiguous() for tensor in tensors]
        self._lent[seq] = whole
        places: dict[int, int] = {}
        memories: list[IpcMemory] = []
        memory_of: list[int] = []
        offsets: list[int] = []
        try:
            with cuda.working_on(torch, self._gpu) as driver:
                for tensor in whole:
                    if not tensor.numel():
                        memory_of.append(0)
                        offsets.append(0)
                        continue
                    base, size_bytes = driver.extent(tensor.data_ptr())
                    if base not in places:
                        places[base] = len(memories)
                        memories.append(IpcMemory(driver.export(base), size_bytes))
                    memory_of.append(places[base])
                    offsets.append(tensor.data_ptr() - base)
        except cuda.CudaError as error:
            raise WavebusError(
                f"a tensor's memory can't be lent ({error}), as that of torch's expandable "
                "segments, say: send with packed=True"
            ) from error
        return encode(IpcTensors(tuple(memories), tuple(memory_of), tuple(offsets)))


def _allocate(driver: cuda.Driver, size_bytes: int, device: torch.device) -> _Buffer:
    pointer = driver.allocate(size_bytes)
    try:
        shared = IpcMemory(driver.export(pointer), driver.extent(pointer)[1])
    except cuda.CudaError:
        driver.free(pointer)
        raise
    return _Buffer(pointer, cuda.as_tensor(torch, pointer, size_bytes, device), shared)


def _freed(buffers: Sequence[_Buffer], device: torch.device) -> list[_Buffer]:
    """Give them back; what is left of them is nothing."""
    if buffers:
        with cuda.working_on(torch, device) as driver:
            for buffer in buffers:
                driver.free(buffer.pointer)
    return []
