"""One update as a stream of chunks: planned from the metadata, filled from the tensors."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

from bus.errors import UsageError
from bus.manifest import Manifest
from bus.messages import WeightChunkMeta
from trainer_agent.sources import WeightSource, dtype_name, meta_of

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
        self._sizes_bytes = [self.manifest.sizes_bytes(k) for k in range(self.manifest.chunks)]
        self.size_bytes = sum(map(sum, self._sizes_bytes))
        self.room_bytes = max(map(sender.packed_bytes, self._sizes_bytes))
        self._metas = metas
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
        manifest, part = self.manifest, self.manifest.part(seq)
        await step(
            WeightChunkMeta(
                update_id,
                seq,
                manifest.names[part],
                manifest.dtypes[part],
                manifest.shapes[part],
                self._sizes_bytes[seq],
                handle,
            )
        )
        self._sender.taken(seq)
        applied.set()

    def _put(self, seq: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> bytes:
        """Take the chunk's tensors from the source and offer them; runs in a thread."""
        chunk: list[torch.Tensor] = []
        for meta in self._metas[self.manifest.part(seq)]:
            name, tensor = next(tensors, ("", None))
            if tensor is None:
                raise UsageError(f"source: ended before {meta.name}, which its metadata has")
            # By field: to make a TensorMeta of each takes longer than to copy a small tensor.
            same = tensor.shape == meta.shape and dtype_name(tensor.dtype) == meta.dtype
            if name != meta.name or not same:
                found = meta_of(name, tensor)
                raise UsageError(f"source: yielded {found}, its metadata says {meta}")
            chunk.append(tensor.detach())
        return self._sender.put(seq, chunk)


def _first(error: BaseException) -> BaseException:
    """What went wrong first; chunks under way fail with it, for the same reason."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
