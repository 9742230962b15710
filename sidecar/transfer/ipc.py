"""Receive from a trainer on the same GPU, whose memory there is mapped.

Its buffers are mapped as long as the transport is open; its own tensors, unpacked, for one chunk:
the trainer may give their memory back as soon as that is applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bus import cuda
from bus.transfer import IpcChunk, IpcInit, IpcTensors
from sidecar.transfer.base import (
    Receiver,
    check_lent,
    decoded,
    lent_views,
    transfer_failed,
    views_of,
)
from sidecar.transfer.streams import synchronize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.manifest import TensorMeta
    from bus.transfer import IpcMemory, Place
    from sidecar.transfer.base import Delivered


class IpcReceiver(Receiver):
    """Tensors are views of the trainer's memory, without a copy."""

    lasts = False

    def __init__(self) -> None:
        self._packed = False
        self._open = False
        self._buffers: list[_Mapped] = []
        self._chunk: list[_Mapped] = []

    def open(self, params: bytes, place: Place) -> None:  # noqa: ARG002 - all are equal
        init = decoded(params, IpcInit)
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

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        self._need_open()
        if self._packed:
            chunk = decoded(handle, IpcChunk)
            return views_of(self._buffer(chunk), chunk.offsets_bytes, tensors)
        return self._lent(tensors, handle)

    def receive_into(self, tensors: tuple[TensorMeta, ...], handle: bytes, into: Delivered) -> bool:
        self._need_open()
        if self._packed:
            chunk = decoded(handle, IpcChunk)
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
        """Who copies, is waited for: the trainer will write there next."""
        if self._chunk:
            self._unmap_chunk()
        elif self._buffers:
            synchronize(self.device)

    def close(self) -> None:
        self._open = False
        self._unmap_chunk()
        self._buffers = self._unmapped(self._buffers)

    def _check(self, init: IpcInit) -> None:
        if self.device.type != "cuda":
            raise transfer_failed(
                f"ipc needs an engine on the trainer's GPU, and this one's weights are on "
                f"{self.device}: use shm or gloo"
            )
        own = cuda.device_uuid(torch, self.device)
        if own != init.gpu:
            raise transfer_failed(
                f"the trainer lends memory of GPU {init.gpu}, and this worker is on GPU {own}: "
                "use nccl between GPUs"
            )

    def _need_open(self) -> None:
        if not self._open:
            raise transfer_failed("the trainer's memory is not mapped: open it first")

    def _buffer(self, chunk: IpcChunk) -> torch.Tensor:
        if chunk.buffer >= len(self._buffers):
            raise transfer_failed(f"buffer {chunk.buffer} of {len(self._buffers)}")
        return self._buffers[chunk.buffer].memory

    def _lent(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        """Those of a chunk, in the trainer's own memory, which is mapped until :meth:`release`."""
        lent = decoded(handle, IpcTensors)
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
            with cuda.working_on(torch, self.device) as driver:
                for memory in memories:
                    pointer = driver.open(memory.handle)
                    mapped.append(_Mapped(pointer, memory.size_bytes, self.device))
        except cuda.CudaError as error:
            self._unmapped(mapped)
            raise transfer_failed(
                f"can't map the trainer's memory: {error}; trainer and engine must be different "
                "processes of one host, which see each other (containers: --ipc=host)"
            ) from error
        return mapped

    def _unmap_chunk(self) -> None:
        self._chunk = self._unmapped(self._chunk)

    def _unmapped(self, mapped: Sequence[_Mapped]) -> list[_Mapped]:
        """Let it go, once nobody reads there; what is left of it is nothing."""
        if mapped:
            with cuda.working_on(torch, self.device) as driver:
                for each in mapped:
                    driver.close(each.pointer)
        return []


class _Mapped:
    """An allocation of the trainer's, seen from here."""

    def __init__(self, pointer: int, size_bytes: int, device: torch.device) -> None:
        self.pointer = pointer
        self.memory: torch.Tensor = cuda.as_tensor(torch, pointer, size_bytes, device)
