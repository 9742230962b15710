"""One update as a stream of chunks: planned from the metadata, filled from the tensors."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import torch

from bus.messages import ChunkSent
from bus.weight_transfer.checksum import checksums
from trainer_agent.asking import announced, together
from trainer_agent.plan import Plan
from trainer_agent.sources import Devices, as_announced, tensor_metas

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Verify
    from bus.weight_transfer.base import Sender
    from trainer_agent.asking import Step
    from trainer_agent.snapshot import Copy
    from trainer_agent.sources import WeightSource
    from trainer_agent.updating import Update


class ChunkStream:
    """Sends a source chunk by chunk, with as many under way as the sender has room for.

    Of each chunk engines hear twice: before it is sent, so that they receive it, and after
    that, with its checksums, so that they load it.

    Attributes:
        all_sent: the last chunk has left, and engines have been told so.
        on_released: called when the source's tensors may change: all of them are in the sender's
            buffers; or, of one that sends them from where they are, engines have taken them.
        copy: what is taken from the source is copied there.
    """

    def __init__(
        self, source: WeightSource, sender: Sender, *, chunk_bytes: int, verify: Verify
    ) -> None:
        self.plan = Plan.of_source(tensor_metas(source.metadata()), chunk_bytes=chunk_bytes)
        self.room_bytes = self.plan.room_bytes(sender)
        self._left = iter(source)
        self._tensors = as_announced(self.plan.metas, self._left)
        self._taking = threading.Lock()
        self._devices = Devices()
        self._sender = sender
        self._filled: deque[_Chunk] = deque()
        self._sending = anyio.Lock()  # chunks leave one after the other, in order
        self._told = [anyio.Event() for _ in range(self.plan.chunks)]  # that they have
        self.all_sent = anyio.Event()
        self.copy: Copy | None = None
        self.on_released: Callable[[], None] = nothing
        self.verify: Verify = verify if sender.is_bit_exact else "unsupported"

    async def fill(self) -> None:
        """Take from the source what there is room for. Nothing leaves: engines generate on."""
        while len(self._filled) < min(self._sender.prefetch_depth, self.plan.chunks):
            self._filled.append(await self._put(len(self._filled)))

    async def send(self, update: Update, step: Step) -> None:
        """Tell of every chunk once the engines are paused, and send it once they have started;
        return when every engine has applied every one.

        ``step`` sends one message and waits for all engines' acks.
        """
        rooms: deque[anyio.Event] = deque()
        async with together() as tasks:
            for seq in range(self.plan.chunks):
                if len(rooms) == self._sender.prefetch_depth:
                    await rooms.popleft().wait()
                chunk = self._filled.popleft() if self._filled else await self._put(seq)
                if self._sender.packed and seq + 1 == self.plan.chunks:
                    self.on_released()
                await update.paused.wait()
                free = anyio.Event()
                rooms.append(free)
                tasks.start_soon(self._send, update, chunk, step, free)
        self.on_released()

    async def _send(self, update: Update, chunk: _Chunk, step: Step, free: anyio.Event) -> None:
        """Tell, send, and tell that it is sent; both words are answered when it is applied."""
        seq = chunk.seq
        async with announced(step, self.plan.chunk_meta(update.id, seq, chunk.handle)):
            await update.started.wait()
            async with self._sending:
                if self._sender.can_queue:
                    await _in_thread(self._sender.queue, seq)
                elif self._sender.is_collective:
                    await _in_thread(self._sender.transfer, seq)
                else:
                    self._sender.transfer(seq)
            if self._sender.can_queue:
                await _in_thread(self._sender.transfer, seq)
            if self._sender.is_collective:
                free.set()  # its engines have it in memory of their own
            if seq:
                await self._told[seq - 1].wait()  # its thread may come back later than this one's
            async with together() as tasks:
                tasks.start_soon(step, ChunkSent(update.id, seq, self.verify, chunk.sums))
                await anyio.lowlevel.checkpoint()  # it is on its way
                self._told[seq].set()
                if seq + 1 == self.plan.chunks:
                    self.all_sent.set()
        self._sender.on_taken(seq)
        free.set()

    def drain(self) -> None:
        """Take what is left of the source, for those who gather it with us."""
        with self._taking:
            for _ in self._left:
                pass

    async def _put(self, seq: int) -> _Chunk:
        return await anyio.to_thread.run_sync(self._take, seq)

    def _take(self, seq: int) -> _Chunk:
        """Take the chunk's tensors from the source and offer them; runs in a thread."""
        with self._taking:
            found = itertools.islice(self._tensors, self.plan.tensors_of(seq))
            chunk = [tensor.detach() for _, tensor in found]
            for tensor in chunk:
                self._devices.before(tensor)
        if self.copy is not None:
            self.copy.take(self.plan.manifest.part(seq).start, chunk)
        return _Chunk(seq, self._sender.put(seq, chunk), checksums(torch, chunk, self.verify))


async def _in_thread(call: Callable[[int], None], seq: int) -> None:
    """Who gives up, does not wait for it: it ends by itself."""
    await anyio.to_thread.run_sync(call, seq, abandon_on_cancel=True)


def nothing() -> None:
    """Nobody is to be told."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One that was put."""

    seq: int
    handle: bytes
    sums: tuple[int, ...]
