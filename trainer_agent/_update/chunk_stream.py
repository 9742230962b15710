"""Sends one update as a stream of chunks.

The metadata of the source determines the chunks; its tensors fill them. :func:`send_stream` runs
the update from ARM to the commit.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import anyio.lowlevel
import torch

from bus._kept_dtypes import kept_patterns
from bus._protocol.core.failures import Failure
from bus._protocol.trainer.chunk_window import ChunkWindow
from bus.errors import BusTimeout, Refused, UpdateFailed, WavebusError, refusal
from bus.messages import ChunkSent, NackCode, Step, WeightChunkMeta
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._update.steps import flat_task_group, run_to_end
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.cast import CastSource
from trainer_agent._weights.source import Devices, as_described, tensor_metas
from trainer_agent._weights.wrappers import require_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bus._manifest import TensorMeta
    from bus._weight_transfer.base import Sender
    from bus.messages import Verify
    from trainer_agent._connection import Connection
    from trainer_agent._report import UpdateReport
    from trainer_agent._update.steps import Steps
    from trainer_agent._update.transport import Transport
    from trainer_agent._update.update import Update
    from trainer_agent._weights.snapshot import WeightsCopy
    from trainer_agent._weights.source import Weights, WeightSource

    Messages: TypeAlias = tuple[WeightChunkMeta, ChunkSent]  # of a chunk in the sender's buffers

_LOOK_S: Final = 0.5  # how often the progress of the source is checked


class ChunkStream:
    """Sends a source in chunks; at most the sender's ``prefetch_depth`` chunks are in flight.

    Engines get two messages per chunk. WEIGHT_CHUNK_META comes before the tensors: engines begin to
    receive. CHUNK_SENT, with the checksums, comes after the tensors: engines verify and load.

    Args:
        source: the weights.
        sender: the trainer's end of the transport.
        chunk_bytes: the most bytes in one chunk. A larger tensor gets a chunk of its own.
        verify: how much of each tensor is verified by checksum.
        of_model: whether the tensors are a model's weights, and not an adapter's.

    Attributes:
        plan: the manifest, made of the source's metadata.
        all_sent: set when the last chunk and its CHUNK_SENT are sent.
        on_released: called once, when the trainer may modify the source's tensors: when the last
            one is in a buffer, or, without buffers, when engines have loaded all.
        make_copy: makes ``copy`` for the tensors that engines have armed; None: nothing is copied.
        copy: receives a copy of every tensor; None: nothing is copied.
        connection: the trainer's connection. Its ``timeout_s`` limits how long the source may take
            for one tensor.
    """

    def __init__(
        self,
        source: WeightSource,
        sender: Sender,
        *,
        chunk_bytes: int,
        verify: Verify,
        of_model: bool = True,
    ) -> None:
        self._source = source
        self._of_model = of_model
        self._chunk_bytes = chunk_bytes
        self._remaining = iter(source)
        self.make_copy: Callable[[Sequence[TensorMeta]], WeightsCopy] | None = None
        self._make_plan(sender, is_cast=isinstance(source, CastSource) and source.is_lossy)
        self._take_lock = threading.Lock()
        self._taken = 0  # tensors read from the source
        self._is_stuck = False  # a thread still waits in the source
        self.connection: Connection
        self._devices = Devices()
        self._sender = sender
        self._filled: deque[Messages] = deque()
        self._send_lock = anyio.Lock()  # chunks leave one after the other, in order
        self._changed = anyio.Event()  # set when the window changes
        self.all_sent = anyio.Event()
        self.copy: WeightsCopy | None = None
        self.on_released: Callable[[], None] = do_nothing
        self.verify: Verify = verify if sender.is_bit_exact else "unsupported"

    def _make_plan(self, sender: Sender, *, is_cast: bool) -> None:
        metas = tensor_metas(self._source.metadata())
        if self._of_model:
            require_whole(metas)
        self.plan = UpdatePlan.of_source(metas, chunk_bytes=self._chunk_bytes)
        self.plan.manifest = replace(self.plan.manifest, is_cast=is_cast)
        self.buffer_bytes = self.plan.buffer_bytes(sender)
        self._tensors = as_described(self.plan.metas, self._remaining)

    def cast_less(self, refused: Refused) -> bool:
        """Plans again after a refusal by an engine that keeps tensors in a wider dtype.

        Returns:
            Whether the refusal was that; False: nothing has changed.
        """
        if refused.code is not NackCode.DTYPE_KEPT or not isinstance(self._source, CastSource):
            return False
        check_finite = self.plan.check_finite
        changed = self._source.keep(kept_patterns(refused.nack.detail))
        self._make_plan(self._sender, is_cast=changed and self._source.is_lossy)
        self.plan.check_finite = check_finite
        return True

    async def fill(self, update_id: str) -> None:
        """Fills the sender's buffers with the first chunks of the source, and sends nothing yet."""
        while len(self._filled) < min(self._sender.prefetch_depth, self.plan.chunks):
            self._filled.append(await self._put(update_id, len(self._filled)))

    async def send(self, update: Update, steps: Steps) -> None:
        """Sends all chunks, and returns when every engine has loaded them.

        A chunk is announced once ``update.paused`` is set, and sent once ``update.started`` is.

        Args:
            update: the update.
            steps: sends the chunk's messages, and waits until all engines have acknowledged them.
        """
        sender = self._sender
        window = ChunkWindow(
            self.plan.chunks, sender.prefetch_depth, frees_early=sender.is_collective
        )
        async with flat_task_group() as tasks:
            for seq in range(self.plan.chunks):
                await self._wait_until(window.has_room, seq)
                chunk = self._filled.popleft() if self._filled else await self._put(update.id, seq)
                if sender.packed and seq + 1 == self.plan.chunks:
                    self.on_released()
                await update.paused.wait()
                tasks.start_soon(self._send, update, chunk, steps, window)
        if not sender.packed:
            self.on_released()

    async def _send(
        self, update: Update, chunk: Messages, steps: Steps, window: ChunkWindow
    ) -> None:
        """Sends WEIGHT_CHUNK_META, a chunk and CHUNK_SENT; waits until engines have loaded it."""
        meta, sent = chunk
        seq = meta.chunk
        window.on_announced(seq)
        async with steps.announce_chunk(meta):
            await update.started.wait()
            try:
                await self._transfer(seq)
            except WavebusError as error:
                raise _failed_transfer(error, update.id, seq) from error
            self._note(window.on_left, seq)
            # The previous chunk's thread may return later than this one's.
            await self._wait_until(window.is_next_sent, seq)
            async with flat_task_group() as tasks:
                tasks.start_soon(steps.send_chunk, sent)
                await anyio.lowlevel.checkpoint()  # lets CHUNK_SENT leave first
                self._note(window.on_sent, seq)
                if window.has_sent_all:
                    self.all_sent.set()
        self._sender.on_taken(seq)
        self._note(window.on_applied, seq)

    async def _transfer(self, seq: int) -> None:
        async with self._send_lock:
            if self._sender.can_queue:
                await _in_thread(self._sender.queue, seq)
            elif self._sender.is_collective:
                await _in_thread(self._sender.transfer, seq)
            else:
                self._sender.transfer(seq)
        if self._sender.can_queue:
            await _in_thread(self._sender.transfer, seq)

    async def _wait_until(self, holds: Callable[[int], bool], seq: int) -> None:
        while not holds(seq):
            await self._changed.wait()

    def _note(self, event: Callable[[int], None], seq: int) -> None:
        event(seq)
        self._changed.set()
        self._changed = anyio.Event()

    def drain(self) -> None:
        """Reads the rest of the source, so that other ranks don't hang in its collectives."""
        if self._is_stuck:
            return
        with self._take_lock:
            for _ in self._remaining:
                pass

    def close(self) -> None:
        """Closes the source's iterator if it is a generator that no thread is reading."""
        if isinstance(self._remaining, Generator) and self._take_lock.acquire(blocking=False):
            try:
                self._remaining.close()
            finally:
                self._take_lock.release()

    async def _put(self, update_id: str, seq: int) -> Messages:
        taking = asyncio.ensure_future(
            anyio.to_thread.run_sync(self._take, seq, abandon_on_cancel=True)
        )
        taken, moved_s = -1, 0.0
        with anyio.CancelScope(shield=True):  # wait as long as the source makes progress
            while not taking.done():
                if taken != self._taken:
                    taken, moved_s = self._taken, time.monotonic()
                if stuck := self._check_stuck(seq, time.monotonic() - moved_s):
                    self._is_stuck = True
                    taking.cancel()
                    raise stuck
                await asyncio.wait([taking], timeout=_LOOK_S)
        return await run_to_end(self._fill, update_id, seq, await taking)

    def _check_stuck(self, seq: int, waited_s: float) -> WavebusError | None:
        """Returns the error if a tensor takes too long or a rank is lost; else None."""
        self.connection.tensors_taken = self._taken
        if self.connection.lost_rank is not None:
            return refusal(self.connection.lost_rank)
        if waited_s <= self.connection.timeout_s:
            return None
        name = self.plan.metas[min(self._taken, len(self.plan.metas) - 1)].name
        text = (
            f"the source has given no tensor for {waited_s:.1f} s; next is {name}, of chunk {seq}"
        )
        return BusTimeout(text, step=Step.CHUNK, chunk=seq)

    def _take(self, seq: int) -> list[torch.Tensor]:
        """Reads a chunk's tensors from the source; runs in a thread."""
        chunk: list[torch.Tensor] = []
        with self._take_lock:
            for _, tensor in itertools.islice(self._tensors, self.plan.tensor_count(seq)):
                chunk.append(tensor.detach())
                self._taken += 1
            for tensor in chunk:
                self._devices.before_read(tensor)
        return chunk

    def _fill(self, update_id: str, seq: int, chunk: list[torch.Tensor]) -> Messages:
        """Puts a chunk's tensors into the sender's buffers, in a thread; returns its messages."""
        if self.copy is not None:
            self.copy.copy_from(self.plan.manifest.part(seq).start, chunk)
        handle = self._sender.put(seq, chunk)
        meta = WeightChunkMeta(update_id, seq, self.plan.manifest.digest, handle)
        sums = self.plan.sums(seq, chunk, self.verify)
        return meta, ChunkSent(update_id, seq, self.verify, sums)


def _failed_transfer(error: WavebusError, update_id: str, seq: int) -> UpdateFailed:
    code, step = NackCode.TRANSFER_FAILED, str(Step.CHUNK)
    return UpdateFailed(Failure(code, str(error)).nack(step, update_id, seq))


async def _in_thread(call: Callable[[int], None], seq: int) -> None:
    """Runs ``call`` in a thread, which continues even if the caller is cancelled."""
    await anyio.to_thread.run_sync(call, seq, abandon_on_cancel=True)


async def open_source(weights: Weights, config: Any) -> WeightSource:
    """Returns the source for an update's weights.

    The source of a module is made in a thread, because that takes seconds for a model with many
    experts, once per model.

    Args:
        weights: what the caller of ``update_weights`` gave.
        config: the model's configuration, for a state dict of transformers; None: none was given.
    """
    if config is None and not isinstance(weights, torch.nn.Module):
        return as_source(weights)
    return await anyio.to_thread.run_sync(as_source, weights, config)


def do_nothing() -> None:
    """Does nothing; the default of callbacks."""


async def send_stream(
    update: Update, stream: ChunkStream, transport: Transport, steps: Steps, label: str
) -> UpdateReport:
    """Sends a stream's weights to the engines, commits the update, and returns its report.

    If this fails, the caller must call :meth:`Update.end`, which aborts the update.

    Args:
        update: the update, which has begun.
        stream: the weights, in chunks.
        transport: the transport; opened if it is not open.
        steps: sends the update's messages.
        label: the trainer's own name of the weights.
    """
    stream.connection = steps.connection
    is_armed = False
    while not is_armed:
        await transport.open(stream.buffer_bytes)
        reopen = functools.partial(transport.reopen, stream.buffer_bytes)
        try:
            await transport.arm(update, stream.plan, label, reopen)
            is_armed = True
        except Refused as refused:
            if not stream.cast_less(refused):
                raise
    if stream.make_copy is not None:
        copy = await anyio.to_thread.run_sync(stream.make_copy, stream.plan.metas)
        update.copy = stream.copy = copy
    await update.release_ranks(stream.drain)
    await stream.fill(update.id)
    try:
        async with flat_task_group() as tasks:
            tasks.start_soon(update.start)
            tasks.start_soon(stream.send, update, steps)
            await stream.all_sent.wait()
            stream.plan.warn_of_nonfinite(update.id)
            return await update.commit(label, stream.verify)
    except BaseException:
        if transport.sender.is_collective:
            await transport.discard()  # a rank may have left a broadcast
        raise
