"""Transfers weights from the trainer's GPU to the engines' with NCCL: both ends.

Each chunk is one broadcast. Packed, it goes through a buffer on the GPU. Unpacked, its tensors are
broadcast from where they are, in one group call; only tensors elsewhere, or not contiguous, are
copied.

All ends meet at the sender. :mod:`bus._weight_transfer.nccl_communicator` says how an end's wait
finishes if another end dies or is silent.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from typing_extensions import override  # torch requires it

from bus._weight_transfer import nccl_communicator, rendezvous
from bus._weight_transfer.collective import CollectiveReceiver, CollectiveSender, broadcast_failed
from bus._weight_transfer.cuda import nccl_version, resolve_gpu
from bus._weight_transfer.formats import (
    BroadcastChunk,
    NcclInit,
    decode_received,
    encode,
    transfer_failed,
)
from bus._weight_transfer.nccl_communicator import NcclCommunicator
from bus._weight_transfer.packing import check_broadcast, pack
from bus.errors import WavebusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import RankAssignment, World
    from bus._weight_transfer.nccl_communicator import Broadcast
    from bus._weight_transfer.packing import ReceivedChunk, Tensors


class NcclSender(CollectiveSender[NcclCommunicator, NcclInit]):
    """Broadcasts chunks as rank 0.

    One chunk is packed and one is sent, while engines load a third.
    """

    prefetch_depth: int = 3
    can_queue: ClassVar[bool] = True
    can_send_unpacked: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._gpu = torch.device("cpu")
        self._ready: dict[int, list[torch.Tensor]] = {}
        self._queued: dict[int, Broadcast] = {}
        self._stream: torch.cuda.Stream | None = None

    @override
    def open(self, chunk_bytes: int, world: World) -> bytes:
        self.close()
        self._gpu = resolve_gpu(self.device)
        # A stream of its own, so that packing and checksums never wait for a broadcast.
        self._stream = torch.cuda.Stream(self._gpu)  # type: ignore[no-untyped-call]
        room = max(chunk_bytes, 1) if self.packed else 0
        try:
            self._buffers = [
                torch.empty(room, dtype=torch.uint8, device=self._gpu)
                for _ in range(self.prefetch_depth if self.packed else 0)
            ]
        except torch.OutOfMemoryError as error:
            raise WavebusError(
                f"{self._gpu} has no room for {self.prefetch_depth} chunks of {room} bytes: "
                "lower chunk_bytes or buffers, or send with packed=False"
            ) from error
        point = rendezvous.MeetingPoint.open(world, room, self.prefetch_depth)
        return self._listen(point, NcclInit(**point.params, version=nccl_version()), world)

    @override
    def _join(self, init: NcclInit) -> NcclCommunicator:
        return nccl_communicator.meet(init, self._place, self._gpu, self._point)

    @override
    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        with torch.cuda.device(self._gpu):
            if self.packed:
                buffer = self._buffers[seq % self.prefetch_depth]
                size_bytes = pack(buffer, tensors)[-1]
                self._ready[seq] = [buffer[:size_bytes]] if size_bytes else []
            else:
                pieces = [
                    _as_contiguous_bytes(tensor, self._gpu) for tensor in tensors if tensor.numel()
                ]
                size_bytes = sum(piece.numel() for piece in pieces)
                self._ready[seq] = pieces
            # Packing must not count for the broadcast's deadline.
            torch.cuda.current_stream(self._gpu).synchronize()
        return encode(BroadcastChunk(size_bytes))

    @override
    def queue(self, seq: int) -> None:
        pieces = self._ready.pop(seq)
        if not pieces:
            return
        try:
            communicator = self._require_communicator()
            with torch.cuda.device(self._gpu), torch.cuda.stream(self._stream):
                self._queued[seq] = communicator.launch(pieces)
        except RuntimeError as error:
            raise broadcast_failed(seq, error) from error

    @override
    def transfer(self, seq: int) -> None:
        if seq in self._ready:
            self.queue(seq)
        under_way = self._queued.pop(seq, None)
        if under_way is None:
            return
        try:
            under_way.wait()
        except RuntimeError as error:
            raise broadcast_failed(seq, error) from error

    @override
    def close(self) -> None:
        super().close()
        self._ready = {}
        self._queued = {}


def _as_contiguous_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor's bytes on a GPU, copied only if not contiguous or elsewhere."""
    return tensor.to(device).contiguous().reshape(-1).view(torch.uint8)


_BYTES: Final = "nccl"  # key of ReceivedChunk.memo: the bytes of each tensor


class NcclReceiver(CollectiveReceiver[NcclCommunicator, NcclInit]):
    """Receives as one rank of the trainer's communicator.

    Packed, it has as many buffers as the trainer. Unpacked, it makes new tensors for each chunk,
    which belong to the caller.
    """

    can_launch = True

    @override
    def open(self, params: bytes, place: RankAssignment) -> None:
        init = decode_received(params, NcclInit)
        self.close()
        self._check(init)
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
        self._meet(init, place)
        self.prefetch_depth = init.buffers
        self.is_owned = not init.chunk_bytes
        self.room_bytes = init.chunk_bytes or None

    @override
    def _join(self, init: NcclInit, place: RankAssignment) -> NcclCommunicator:
        here = torch.empty(0, device=self.device).device  # the device with its index
        return nccl_communicator.meet(init, place, here)

    @override
    def launch(
        self, tensors: tuple[TensorMeta, ...], handle: bytes, into: ReceivedChunk | None = None
    ) -> Callable[[], Tensors]:
        chunk = decode_received(handle, BroadcastChunk)
        # First, so that no error later leaves the other ranks waiting for this one.
        communicator = self._require_communicator()
        if self.is_owned:
            made, memories = self._unpacked(tensors, chunk, into)
        else:
            made, memories = self._packed(tensors, chunk, into)
        if not memories:
            return lambda: made
        with self._transfer_errors(communicator):
            under_way = communicator.launch(memories)

        def arrived() -> Tensors:
            with self._transfer_errors(communicator):
                under_way.wait()
            return made

        return arrived

    @override
    def receive(self, tensors: tuple[TensorMeta, ...], handle: bytes) -> Tensors:
        opened = self._communicator is not None
        with torch.cuda.device(self.device) if opened else contextlib.nullcontext():
            return self.launch(tensors, handle)()

    def _check(self, init: NcclInit) -> None:
        """Rejects params that would leave the other ends waiting, or fail half-way."""
        if self.device.type != "cuda":
            raise transfer_failed(
                f"nccl needs an engine on a GPU, and this one's weights are on {self.device}: "
                "use shm or gloo"
            )
        own = nccl_version()
        if own != init.version:
            raise transfer_failed(
                f"the trainer's NCCL is {init.version}, this worker's is {own}: they must be the "
                "same, so install the same torch on both sides"
            )

    def _packed(
        self, tensors: tuple[TensorMeta, ...], chunk: BroadcastChunk, into: ReceivedChunk | None
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """Returns the chunk's tensors, and the memory to broadcast into."""
        if into is not None:
            room_bytes = into.memory.numel()
            check_broadcast(chunk.size_bytes, room_bytes, room_bytes)
            return into, [into.memory] if room_bytes else []
        made, memory = self._next_buffer(tensors, chunk)
        return made, [memory] if chunk.size_bytes else []

    def _unpacked(
        self, tensors: tuple[TensorMeta, ...], chunk: BroadcastChunk, into: ReceivedChunk | None
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """Returns the chunk's tensors, and the memory to broadcast into."""
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
    def _transfer_errors(self, communicator: NcclCommunicator) -> Iterator[None]:
        """Turns errors of the block into ``transfer_failed``, and closes the transport."""
        try:
            yield
        except RuntimeError as error:
            if self._communicator is communicator:
                self.close()  # later broadcasts in it could not be assigned to chunks
            raise transfer_failed(f"the broadcast broke: {rendezvous.reason(error)}") from error


def _as_bytes(tensors: Tensors) -> list[torch.Tensor]:
    """Returns each tensor's bytes, without the empty tensors."""
    return [tensor.view(-1).view(torch.uint8) for _, tensor in tensors if tensor.numel()]
