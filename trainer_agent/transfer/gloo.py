"""Send over TCP with gloo, to engines on any number of hosts: each chunk is one broadcast.

The sender keeps the store where all ends find each other. An end that dies breaks the broadcast
for everybody at once; one that is only silent, after a timeout for each chunk, which so is a
deadline on progress and not on the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

import bus.gloo
from bus import rendezvous
from bus.errors import WavebusError
from bus.transfer import GlooChunk, GlooInit, Place, encode
from trainer_agent.transfer.base import Sender, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.transfer import World


class GlooSender(Sender):
    """Rank 0. One chunk is packed while the one before travels."""

    collective: ClassVar[bool] = True

    def __init__(self) -> None:
        self._store: Any = None
        self._group: Any = None
        self._init: GlooInit | None = None
        self._place = Place(0, 1, 0)
        self._buffers: list[torch.Tensor] = []
        self._filled_bytes: dict[int, int] = {}

    def open(self, chunk_bytes: int, world: World) -> bytes:
        self.close()
        room = max(chunk_bytes, 1)
        timeout_s = rendezvous.patience_s(room)
        try:
            self._store = rendezvous.keep_store(dist, world.address, timeout_s)
        except RuntimeError as error:
            raise WavebusError(f"can't open a store at {world.address}: {error}") from error
        port: int = self._store.port
        self._buffers = [torch.empty(room, dtype=torch.uint8) for _ in range(self.depth)]
        self._init = GlooInit(world.address, port, room, self.depth, timeout_s * 1000)
        self._place = Place(world.number, world.size, 0)
        return encode(self._init)

    def meet(self) -> None:
        init = self._init
        assert init is not None, "open comes first"
        try:
            group = bus.gloo.join(dist, init, self._place)
        except (RuntimeError, OSError) as error:
            raise WavebusError(
                f"not all {self._place.world_size - 1} ends of the engines came to "
                f"{init.host}:{init.port}: {rendezvous.reason(error)}"
            ) from error
        if self._init is init:  # not closed meanwhile
            self._group = group

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        filled_bytes = pack(self._buffers[seq % self.depth], tensors)[-1]
        self._filled_bytes[seq] = filled_bytes
        return encode(GlooChunk(filled_bytes))

    def transfer(self, seq: int) -> None:
        size_bytes = self._filled_bytes.pop(seq)
        if not size_bytes:
            return
        try:
            bus.gloo.broadcast(dist, self._group, self._buffers[seq % self.depth][:size_bytes])
        except RuntimeError as error:
            raise WavebusError(
                f"the broadcast of chunk {seq} broke: {rendezvous.reason(error)}"
            ) from error

    def close(self) -> None:
        """With the store gone, whoever still waits in it for the others is told so."""
        self._store = self._group = self._init = None
        self._buffers = []
        self._filled_bytes = {}
