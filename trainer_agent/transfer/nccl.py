"""Send from this trainer's GPU to the engines' with NCCL: each chunk is one broadcast.

Packed, a chunk goes through a buffer on the GPU. Unpacked, its tensors are broadcast one by one,
in one go, from where they are: only what lies elsewhere, or not in one piece, is copied.

The sender keeps the store where all ends find each other. How an end that dies or is silent ends
the others' waiting: see :mod:`bus.nccl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

import bus.nccl
from bus import rendezvous
from bus.cuda import nccl_version
from bus.errors import WavebusError
from bus.transfer import NcclChunk, NcclInit, Place, encode
from trainer_agent.transfer.base import Sender, gpu, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.transfer import World


class NcclSender(Sender):
    """Rank 0. A chunk is packed while one travels, and engines have one to load."""

    depth: int = 3
    collective: ClassVar[bool] = True
    queues: ClassVar[bool] = True
    sends_unpacked: ClassVar[bool] = True

    def __init__(self) -> None:
        self._store: Any = None
        self._communicator: bus.nccl.Communicator | None = None
        self._init: NcclInit | None = None
        self._place = Place(0, 1, 0)
        self._gpu = torch.device("cpu")
        self._buffers: list[torch.Tensor] = []
        self._ready: dict[int, list[torch.Tensor]] = {}
        self._queued: dict[int, bus.nccl.Broadcast] = {}
        self._stream: torch.cuda.Stream | None = None

    def open(self, chunk_bytes: int, world: World) -> bytes:
        self.close()
        self._gpu = gpu(self.device)
        # Its own: where chunks are packed, and summed up, nothing waits for a broadcast.
        self._stream = torch.cuda.Stream(self._gpu)  # type: ignore[no-untyped-call]
        room = max(chunk_bytes, 1) if self.packed else 0
        timeout_s = rendezvous.patience_s(room)
        try:
            self._buffers = [
                torch.empty(room, dtype=torch.uint8, device=self._gpu)
                for _ in range(self.depth if self.packed else 0)
            ]
        except torch.OutOfMemoryError as error:
            raise WavebusError(
                f"{self._gpu} has no room for {self.depth} chunks of {room} bytes: "
                "lower chunk_bytes or buffers, or send with packed=False"
            ) from error
        try:
            self._store = rendezvous.keep_store(dist, world.address, timeout_s)
        except RuntimeError as error:
            raise WavebusError(f"can't open a store at {world.address}: {error}") from error
        self._init = NcclInit(
            world.address,
            self._store.port,
            room,
            self.depth,
            timeout_s * 1000,
            nccl_version(torch),
        )
        self._place = Place(world.number, world.size, 0)
        return encode(self._init)

    def meet(self) -> None:
        init = self._init
        assert init is not None, "open comes first"
        try:
            met = bus.nccl.meet(torch, dist, init, self._place, self._gpu)
        except (RuntimeError, OSError) as error:
            raise WavebusError(
                f"not all {self._place.world_size - 1} ends of the engines came to "
                f"{init.host}:{init.port}: {bus.nccl.reason(error)}"
            ) from error
        self._communicator = met
        if self._init is not init:  # closed meanwhile
            met.close()

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        with torch.cuda.device(self._gpu):
            if self.packed:
                buffer = self._buffers[seq % self.depth]
                size_bytes = pack(buffer, tensors)[-1]
                self._ready[seq] = [buffer[:size_bytes]] if size_bytes else []
            else:
                pieces = [_in_one_piece(tensor, self._gpu) for tensor in tensors if tensor.numel()]
                size_bytes = sum(piece.numel() for piece in pieces)
                self._ready[seq] = pieces
            # Packing is no part of what a broadcast may take.
            torch.cuda.current_stream(self._gpu).synchronize()
        return encode(NcclChunk(size_bytes))

    def queue(self, seq: int) -> None:
        pieces = self._ready.pop(seq)
        if not pieces:
            return
        try:
            if self._communicator is None:
                raise RuntimeError("it is closed")
            timeout_s = rendezvous.patience_s(sum(piece.numel() for piece in pieces))
            with torch.cuda.device(self._gpu), torch.cuda.stream(self._stream):
                self._queued[seq] = self._communicator.launch(pieces, timeout_s)
        except RuntimeError as error:
            raise _broken(seq, error) from error

    def transfer(self, seq: int) -> None:
        if seq in self._ready:
            self.queue(seq)
        under_way = self._queued.pop(seq, None)
        if under_way is None:
            return
        try:
            under_way.wait()
        except RuntimeError as error:
            raise _broken(seq, error) from error

    def close(self) -> None:
        """With the store gone, whoever still waits for the others is told so."""
        communicator, self._communicator = self._communicator, None
        self._store = self._init = None
        if communicator is not None:
            communicator.close()
        self._buffers = []
        self._ready = {}
        self._queued = {}


def _broken(seq: int, error: RuntimeError) -> WavebusError:
    return WavebusError(f"the broadcast of chunk {seq} broke: {bus.nccl.reason(error)}")


def _in_one_piece(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor's bytes on that GPU, without a copy where they are there in row-major order."""
    return tensor.to(device).contiguous().reshape(-1).view(torch.uint8)
