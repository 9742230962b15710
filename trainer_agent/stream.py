"""One update as a stream of chunks: planned from the metadata, filled from the tensors."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel
import torch

from bus.checksum import checksums
from bus.messages import ChunkSent
from trainer_agent.plan import Plan
from trainer_agent.sources import as_announced, tensor_metas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from bus.messages import GroupAck, Message, Verify, WeightChunkMeta
    from trainer_agent.sources import WeightSource
    from trainer_agent.transfer import Sender

    Step: TypeAlias = Callable[[Message], Coroutine[object, object, GroupAck]]


class ChunkStream:
    """Sends a source chunk by chunk, with as many under way as the sender has room for.

    Of each chunk engines hear twice: before it is sent, so that they receive it, and after
    that, with its checksums, so that they load it.
    """

    def __init__(
        self, source: WeightSource, sender: Sender, *, chunk_bytes: int, verify: Verify
    ) -> None:
        self.plan = Plan.of_source(tensor_metas(source.metadata()), chunk_bytes=chunk_bytes)
        self.room_bytes = self.plan.room_bytes(sender)
        self._left = iter(source)
        self._tensors = as_announced(self.plan.metas, self._left)
        self._taking = threading.Lock()
        self._sender = sender
        self._sending = anyio.Lock()  # chunks leave one after the other, in order
        self.verify: Verify = verify if sender.verifies else "unsupported"

    async def send(self, update_id: str, step: Step) -> None:
        """Send every chunk; return when every engine has applied every one.

        ``step`` sends one message and waits for all engines' acks.
        """
        try:
            await self._send_all(update_id, step)
        except BaseExceptionGroup as group:
            raise first_of(group) from group

    async def _send_all(self, update_id: str, step: Step) -> None:
        waiting: deque[anyio.Event] = deque()
        async with anyio.create_task_group() as tasks:
            for seq in range(self.plan.chunks):
                if len(waiting) == self._sender.depth:
                    await waiting.popleft().wait()
                chunk = await anyio.to_thread.run_sync(self._put, seq)
                applied = anyio.Event()
                waiting.append(applied)
                tasks.start_soon(self._send, update_id, chunk, step, applied)

    async def _send(
        self,
        update_id: str,
        chunk: _Chunk,
        step: Step,
        applied: anyio.Event,
    ) -> None:
        """Tell, send, and tell that it is sent; both words are answered when it is applied."""
        seq = chunk.seq
        meta = self.plan.chunk_meta(update_id, seq, chunk.handle)
        async with announced(step, meta):
            async with self._sending:
                if self._sender.collective:
                    await anyio.to_thread.run_sync(
                        self._sender.transfer, seq, abandon_on_cancel=True
                    )
                else:
                    self._sender.transfer(seq)
            await step(ChunkSent(update_id, seq, self.verify, chunk.sums))
        self._sender.taken(seq)
        applied.set()

    def drain(self) -> None:
        """Take what is left of the source, for those who gather it with us."""
        with self._taking:
            for _ in self._left:
                pass

    def _put(self, seq: int) -> _Chunk:
        """Take the chunk's tensors from the source and offer them; runs in a thread."""
        with self._taking:
            found = itertools.islice(self._tensors, self.plan.tensors_of(seq))
            chunk = [tensor.detach() for _, tensor in found]
        return _Chunk(seq, self._sender.put(seq, chunk), checksums(torch, chunk, self.verify))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One that was put."""

    seq: int
    handle: bytes
    sums: tuple[int, ...]


@asynccontextmanager
async def announced(step: Step, meta: WeightChunkMeta) -> AsyncIterator[None]:
    """Engines are told of a chunk before the block; it is applied when that ends, in which the
    word that it is sent must follow."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step, meta)
        await anyio.lowlevel.checkpoint()  # it is on its way
        yield


def first_of(error: BaseException) -> BaseException:
    """What went wrong first; chunks under way fail with it, for the same reason."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
