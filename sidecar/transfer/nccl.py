"""Receive on this worker's GPU with NCCL: each chunk is one broadcast from the trainer's."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

import bus.nccl
from bus import rendezvous
from bus.cuda import nccl_version
from bus.transfer import NcclChunk, NcclInit
from sidecar.transfer.base import (
    Receiver,
    Views,
    check_broadcast,
    decoded,
    packed_offsets,
    transfer_failed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bus.manifest import TensorMeta
    from bus.transfer import Place
    from sidecar.transfer.base import Delivered, Tensors

_BYTES: Final = "nccl"  # what is remembered of tensors that lie where they will lie again


class NcclReceiver(Receiver):
    """One rank of the trainer's communicator. Packed, it has room for as many chunks as the
    trainer has; unpacked, it makes new tensors for each, which are the caller's."""

    collective = True
    launches = True

    def __init__(self) -> None:
        self._communicator: bus.nccl.Communicator | None = None
        self._buffers: deque[torch.Tensor] = deque()
        self._views = Views()

    def open(self, params: bytes, place: Place) -> None:
        init = decoded(params, NcclInit)
        self.close()
        self._check(init)
        here = torch.empty(0, device=self.device).device  # with its number
        try:
            self._buffers.extend(
                torch.empty(init.chunk_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(init.buffers if init.chunk_bytes else 0)
            )
        except torch.OutOfMemoryError as error:
            self.close()
            raise transfer_failed(
                f"{self.device} has no room for {init.buffers} chunks of {init.chunk_bytes} "
                "bytes: lower chunk_bytes or buffers, or the share of memory that vLLM takes"
            ) from error
        try:
            self._communicator = bus.nccl.meet(torch, dist, init, place, here)
        except (RuntimeError, OSError) as error:
            self.close()
            raise transfer_failed(
                f"rank {place.rank} of {place.world_size} can't meet the others at "
                f"{init.host}:{init.port}: {bus.nccl.reason(error)}"
            ) from error
        self.depth = init.buffers
        self.owned = not init.chunk_bytes
        self.room_bytes = init.chunk_bytes or None

    def launch(
        self, tensors: tuple[TensorMeta, ...], handle: bytes, into: Delivered | None = None
    ) -> Callable[[], Tensors]:
        chunk = decoded(handle, NcclChunk)
        # Before anything that could leave the others waiting for this rank.
        communicator = self._communicator
        if communicator is None:
            raise transfer_failed("the communicator is not open")
        if self.owned:
            made, memories = self._one_by_one(tensors, chunk, into)
        else:
            made, memories = self._packed(tensors, chunk, into)
        if not memories:
            return lambda: made
        timeout_s = rendezvous.patience_s(chunk.size_bytes)
        with self._failing(communicator):
            under_way = communicator.launch(memories, timeout_s)

        def arrived() -> Tensors:
            with self._failing(communicator):
                under_way.wait()
            return made

        return arrived

    def receive(self, tensors: tuple[TensorMeta, ...], handle: bytes) -> Tensors:
        opened = self._communicator is not None
        with torch.cuda.device(self.device) if opened else contextlib.nullcontext():
            return self.launch(tensors, handle)()

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        self._buffers.clear()
        self._views.clear()

    def _check(self, init: NcclInit) -> None:
        """What would leave the others waiting, or break in the middle."""
        if self.device.type != "cuda":
            raise transfer_failed(
                f"nccl needs an engine on a GPU, and this one's weights are on {self.device}: "
                "use shm or gloo"
            )
        own = nccl_version(torch)
        if own != init.version:
            raise transfer_failed(
                f"the trainer's NCCL is {init.version}, this worker's is {own}: they must be the "
                "same, so install the same torch on both sides"
            )

    def _packed(
        self, tensors: tuple[TensorMeta, ...], chunk: NcclChunk, into: Delivered | None
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """The tensors, and what is broadcast."""
        if into is not None:
            room_bytes = into.memory.numel()
            check_broadcast(chunk.size_bytes, room_bytes, room_bytes)
            return into, [into.memory] if room_bytes else []
        offsets = packed_offsets(tensors)
        memory = self._buffers[0]
        check_broadcast(chunk.size_bytes, offsets[-1], memory.numel())
        made = self._views.of(memory, offsets[:-1], tensors)
        self._buffers.rotate(-1)
        return made, [memory[: chunk.size_bytes]] if chunk.size_bytes else []

    def _one_by_one(
        self, tensors: tuple[TensorMeta, ...], chunk: NcclChunk, into: Delivered | None
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """As :meth:`_packed`."""
        expected_bytes = sum(meta.size_bytes for meta in tensors)
        if chunk.size_bytes != expected_bytes:
            raise transfer_failed(
                f"a broadcast of {chunk.size_bytes} bytes for tensors that have {expected_bytes}"
            )
        if into is not None:
            if _BYTES not in into.memo:
                into.memo[_BYTES] = _as_bytes(into)
            return into, into.memo[_BYTES]
        made: Tensors = []
        for meta in tensors:
            dtype: torch.dtype = getattr(torch, meta.dtype)
            made.append((meta.name, torch.empty(meta.shape, dtype=dtype, device=self.device)))
        return made, _as_bytes(made)

    @contextlib.contextmanager
    def _failing(self, communicator: bus.nccl.Communicator) -> Iterator[None]:
        """What breaks in the block, is a transport that broke."""
        try:
            yield
        except RuntimeError as error:
            if self._communicator is communicator:
                self.close()  # what comes next in it belongs to nothing
            raise transfer_failed(f"the broadcast broke: {bus.nccl.reason(error)}") from error


def _as_bytes(tensors: Tensors) -> list[torch.Tensor]:
    """Those that have any."""
    return [tensor.view(-1).view(torch.uint8) for _, tensor in tensors if tensor.numel()]
