"""Receive over TCP with gloo, on any number of hosts: each chunk is one broadcast."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import bus.gloo
from bus import rendezvous
from bus.transfer import GlooChunk, GlooInit
from sidecar.transfer.base import (
    Receiver,
    Views,
    check_broadcast,
    decoded,
    packed_offsets,
    transfer_failed,
)

if TYPE_CHECKING:
    from bus.manifest import TensorMeta
    from bus.transfer import Place


class GlooReceiver(Receiver):
    """One rank of the trainer's communicator, with room for as many chunks as the trainer has."""

    collective = True

    def __init__(self) -> None:
        self._group: Any = None
        self._buffers: deque[torch.Tensor] = deque()
        self._views = Views()

    def open(self, params: bytes, place: Place) -> None:
        init = decoded(params, GlooInit)
        self.close()
        try:
            self._group = bus.gloo.join(dist, init, place)
        except (RuntimeError, OSError) as error:
            raise transfer_failed(
                f"rank {place.rank} of {place.world_size} can't meet the others at "
                f"{init.host}:{init.port}: {rendezvous.reason(error)}"
            ) from error
        self._buffers.extend(
            torch.empty(init.chunk_bytes, dtype=torch.uint8) for _ in range(init.buffers)
        )
        self.depth = init.buffers
        self.room_bytes = init.chunk_bytes

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        chunk = decoded(handle, GlooChunk)
        offsets = packed_offsets(tensors)
        # Before anything that could leave the others waiting for this rank.
        group = self._group
        if group is None:
            raise transfer_failed("the communicator is not open")
        memory = self._buffers[0]
        check_broadcast(chunk.size_bytes, offsets[-1], memory.numel())
        if chunk.size_bytes:
            try:
                bus.gloo.broadcast(dist, group, memory[: chunk.size_bytes])
            except RuntimeError as error:
                if self._group is group:
                    self.close()  # what comes next in it belongs to nothing
                raise transfer_failed(f"the broadcast broke: {rendezvous.reason(error)}") from error
        if self._group is group:  # it may have been opened anew meanwhile
            self._buffers.rotate(-1)
        return self._views.of(memory, offsets[:-1], tensors)

    def close(self) -> None:
        self._group = None
        self._buffers.clear()
        self._views.clear()
