"""One update as a stream of chunks: planned from the metadata, filled from the tensors."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

from bus.errors import UsageError
from bus.manifest import Manifest
from bus.messages import WeightChunkMeta
from trainer_agent.sources import WeightSource, meta_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import torch

    from bus.messages import GroupAck, Message
    from trainer_agent.transfer import Sender


class ChunkStream:
    """Sends a source chunk by chunk, with as many under way as the sender has room for."""

    def __init__(self, source: WeightSource, sender: Sender, *, chunk_bytes: int) -> None:
        metas = source.metadata()
        try:
            self.manifest = Manifest.plan(metas, chunk_bytes=chunk_bytes)
        except ValueError as error:
            raise UsageError(f"source: {error}") from error
        self.size_bytes = sum(meta.size_bytes for meta in metas)
        self.room_bytes = max(
            sender.packed_bytes([t.size_bytes for t in self.manifest.chunk(k)])
            for k in range(self.manifest.chunks)
        )
        self._source = source
        self._sender = sender

    async def send(self, update_id: str, step: Callable[[Message], Awaitable[GroupAck]]) -> None:
        """Send every chunk; return when every engine has applied every one.

        ``step`` sends one message and waits for all engines' acks.
        """
        try:
            await self._send_all(update_id, step)
        except BaseExceptionGroup as group:
            raise _first(group) from group

    async def _send_all(
        self, update_id: str, step: Callable[[Message], Awaitable[GroupAck]]
    ) -> None:
        tensors = iter(self._source)
        waiting: deque[anyio.Event] = deque()
        async with anyio.create_task_group() as tasks:
            for seq in range(self.manifest.chunks):
                if len(waiting) == self._sender.depth:
                    await waiting.popleft().wait()
                handle = await anyio.to_thread.run_sync(self._put, seq, tensors)
                applied = anyio.Event()
                waiting.append(applied)
                tasks.start_soon(self._send, update_id, seq, handle, step, applied)

    async def _send(
        self,
        update_id: str,
        seq: int,
        handle: bytes,
        step: Callable[[Message], Awaitable[GroupAck]],
        applied: anyio.Event,
    ) -> None:
        metas = self.manifest.chunk(seq)
        await step(
            WeightChunkMeta(
                update_id,
                seq,
                tuple(m.name for m in metas),
                tuple(m.dtype for m in metas),
                tuple(m.shape for m in metas),
                tuple(m.size_bytes for m in metas),
                handle,
            )
        )
        self._sender.taken(seq)
        applied.set()

    def _put(self, seq: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> bytes:
        """Take the chunk's tensors from the source and offer them; runs in a thread."""
        chunk: list[torch.Tensor] = []
        for meta in self.manifest.chunk(seq):
            name, tensor = next(tensors, ("", None))
            if tensor is None:
                raise UsageError(f"source: ended before {meta.name}, which its metadata has")
            found = meta_of(name, tensor)
            if found != meta:
                raise UsageError(f"source: yielded {found}, its metadata says {meta}")
            chunk.append(tensor.detach())
        return self._sender.put(seq, chunk)


def _first(error: BaseException) -> BaseException:
    """What went wrong first; chunks under way fail with it, for the same reason."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
