"""Receives chunks for a model, from their announcement until they are loaded.

What the backend's receiver can do decides how a chunk is received:

- A receiver that can launch (:attr:`Receiver.can_launch`) needs no thread: the device receives the
  chunk while the caller goes on, and launches the next one.
- A receiver with several buffers (:attr:`Receiver.prefetch_depth`), or of a collective, receives in
  a thread, one chunk after the other; on a GPU in a stream of its own.
- Any other receiver receives within :meth:`ChunkReceiver.begin`, which returns afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from bus._weight_transfer.formats import transfer_failed
from bus._weight_transfer.packing import ReceivedChunk
from bus.errors import wrong_state
from sidecar._transfer.streams import own_stream, within
from sidecar._transfer.verification import check_delivered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from bus._manifest import TensorMeta
    from bus._weight_transfer.base import Receiver
    from bus._weight_transfer.packing import Tensors


def require_chunk(chunks: Sequence[tuple[TensorMeta, ...]], seq: int) -> tuple[TensorMeta, ...]:
    """Returns names, dtypes and shapes of the tensors of chunk ``seq``.

    Args:
        chunks: names, dtypes and shapes of the tensors of each chunk of the armed manifest.
        seq: number of the chunk in its update.

    Raises:
        EngineError: code ``transfer_failed``: the manifest has no such chunk.
    """
    if seq >= len(chunks):
        raise transfer_failed(f"chunk {seq} is not in the armed manifest")
    return chunks[seq]


class ChunkReceiver:
    """Receives the chunks of one model's updates, and keeps each until it is loaded.

    Only one thread may use it. While that thread opens another transport, a second thread may call
    :meth:`interrupt` and :meth:`clear`.

    Args:
        device: where the weights are.

    Attributes:
        backend: the name of the open transport's backend; empty before the first.
        receiver: the open transport's receiver, or None.
    """

    def __init__(self, device: torch.device) -> None:
        self.backend = ""
        self.receiver: Receiver | None = None
        self._device = device
        self._chunks: dict[int, Future[Tensors]] = {}
        self._launched: dict[int, Callable[[], None]] = {}  # waits of launched chunks
        self._thread: ThreadPoolExecutor | None = None
        self._abandoned = False  # whether _thread may hang in a closed transport
        self._stream: torch.cuda.Stream | None = None

    @property
    def prefetch_depth(self) -> int:
        """How many chunks may be received before the first of them is loaded."""
        return 1 if self.receiver is None else self.receiver.prefetch_depth

    def use(self, backend: str, receiver: Receiver) -> None:
        """Replaces the transport by ``receiver``, the connected end of the named backend."""
        self.close()
        self.backend, self.receiver = backend, receiver

    def close(self) -> None:
        """Closes the transport, and drops all chunks that came over it."""
        self.stop()
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def stop(self) -> None:
        """Drops all chunks without waiting for those that have not arrived yet.

        If a chunk had not arrived yet, the transport is closed, and must be opened again. A thread
        that waits for the chunk is abandoned; it ends at its deadline.
        """
        self._cancel()
        self.clear()

    def interrupt(self) -> None:
        """Ends a :meth:`take` of another thread, which then raises.

        Only a wait in a collective is ended. Other transports deliver or fail soon anyway.
        """
        if self.receiver is not None and self.receiver.is_collective:
            self._cancel()

    def _cancel(self) -> None:
        """Cancels the chunks that have not arrived, and closes the transport if there were any."""
        cancelled = [coming for coming in self._chunks.copy().values() if coming.cancel()]
        if cancelled and self.receiver is not None:
            self._abandoned = True
            self.receiver.close()

    def begin(
        self,
        seq: int,
        chunks: Sequence[tuple[TensorMeta, ...]],
        backend: str,
        handle: bytes,
        into: ReceivedChunk | None = None,
    ) -> None:
        """Begins to receive a chunk; may return before the chunk is there. See :meth:`take`.

        Args:
            seq: number of the chunk in its update. If it was begun before, it is received again.
            chunks: names, dtypes and shapes of the tensors of each chunk of the armed manifest.
            backend: the backend that must be open.
            handle: the sender's handle of the chunk.
            into: memory for the tensors, which only some receivers can use. A launched chunk is
                then received in the caller's CUDA stream.

        Raises:
            EngineError: code ``transfer_failed`` if there is no such chunk, or the transport is not
                open or failed; ``wrong_state`` if all buffers are in use.
        """
        receiver, metas = self.receiver, require_chunk(chunks, seq)
        if receiver is None or backend != self.backend:
            raise transfer_failed(f"transport {backend!r} is not open in this worker")
        self.release(seq)  # a repeated request receives the chunk again
        if into is None and len(self._chunks) >= receiver.prefetch_depth:
            raise wrong_state(f"chunks {sorted(self._chunks)} are received and not loaded yet")
        # From here on, interrupt() can cancel the chunk.
        coming = self._chunks[seq] = Future()
        try:
            if receiver.can_launch:
                with self._in_own_stream() if into is None else contextlib.nullcontext():
                    fetch = receiver.launch(metas, handle, into)
            else:
                fetch = functools.partial(_fetch, receiver, metas, handle, into)
            receive = functools.partial(self._receive, receiver, metas, fetch, into)
            if receiver.can_launch:
                self._launched[seq] = functools.partial(self._deliver, coming, receive)
            elif receiver.prefetch_depth > 1 or receiver.is_collective:
                self._receiving().submit(self._deliver_in_own_stream, coming, receive)
            else:
                coming.set_result(receive())
        except BaseException:
            self._chunks.pop(seq, None)
            raise

    def take(self, seq: int) -> Tensors:
        """Waits for a chunk that was begun, and returns its tensors.

        Args:
            seq: number of the chunk.

        Returns:
            ``(name, tensor)`` pairs, valid until :meth:`release`.

        Raises:
            EngineError: code ``transfer_failed`` if the chunk did not come, or has other tensors
                than the manifest; ``wrong_state`` if it was not begun.
        """
        coming = self._chunks.get(seq)
        if coming is None:
            found = f"only {sorted(self._chunks)}" if self._chunks else "nothing"
            raise wrong_state(f"chunk {seq} is requested, but {found} was received")
        self._wait_for(seq)
        try:
            tensors = coming.result()
        except CancelledError:
            raise transfer_failed(f"chunk {seq} was cancelled before it arrived") from None
        made = self.receiver is not None and self.receiver.is_owned
        if self._stream is not None and made and not isinstance(tensors, ReceivedChunk):
            here = torch.cuda.current_stream(self._device)
            for _, tensor in tensors:
                if tensor.is_cuda:  # gloo receives into the host's memory
                    tensor.record_stream(here)
        return tensors

    def take_own(self, seq: int) -> Tensors:
        """Waits for a chunk; returns its tensors on the weights' device, to keep.

        Args:
            seq: number of the chunk.

        Returns:
            ``(name, tensor)`` pairs, which stay valid after :meth:`release`.

        Raises:
            EngineError: as :meth:`take`; also ``transfer_failed`` if there is no memory for a copy.
        """
        tensors = self.take(seq)
        receiver = self.receiver
        assert receiver is not None, "its tensors are there"
        copied = receiver.is_owned or not receiver.is_lasting
        try:
            return self._copies(tensors, copy=not copied)
        except torch.OutOfMemoryError as error:
            raise transfer_failed(
                f"{self._device} has no memory for a copy of chunk {seq}: lower chunk_bytes"
            ) from error

    def clear(self) -> None:
        """Drops all chunks, after waiting for those that are still arriving."""
        for seq in list(self._chunks):
            self.release(seq)

    def release(self, seq: int) -> None:
        """Frees the buffer of chunk ``seq``, after waiting for the chunk if it is arriving."""
        self._wait_for(seq)
        coming = self._chunks.pop(seq, None)
        if coming is None or self.receiver is None:
            return
        with contextlib.suppress(CancelledError):
            if coming.exception() is None and self.receiver.is_lasting:
                self.receiver.release()

    def _deliver(self, coming: Future[Tensors], receive: Callable[[], Tensors]) -> None:
        """Receives a chunk and sets its future, which can be cancelled until then."""
        failure: BaseException | None = None
        tensors: Tensors = []
        try:
            tensors = receive()
        except BaseException as error:  # noqa: BLE001 - take() raises it
            failure = error
        if not coming.set_running_or_notify_cancel():
            return  # cancelled, and the transport was closed
        if failure is not None:
            coming.set_exception(failure)
        else:
            coming.set_result(tensors)

    def _deliver_in_own_stream(
        self, coming: Future[Tensors], receive: Callable[[], Tensors]
    ) -> None:
        with self._in_own_stream():
            self._deliver(coming, receive)

    def _receive(
        self,
        receiver: Receiver,
        metas: tuple[TensorMeta, ...],
        fetch: Callable[[], Tensors],
        into: ReceivedChunk | None,
    ) -> Tensors:
        received = fetch()
        stays = receiver.is_lasting or received is into
        try:
            check_delivered(self.backend, metas, received)
            kept = received if stays else self._copies(received, copy=True)
        except BaseException:
            receiver.release()
            raise
        if not receiver.is_lasting:
            receiver.release()
        return kept

    def _copies(self, tensors: Tensors, *, copy: bool) -> Tensors:
        return [(name, tensor.to(self._device, copy=copy)) for name, tensor in tensors]

    def _wait_for(self, seq: int) -> None:
        """Waits for a launched chunk; returns at once for any other."""
        launched = self._launched.pop(seq, None)
        if launched is not None:
            launched()

    def _receiving(self) -> ThreadPoolExecutor:
        if self._thread is not None and self._abandoned:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
        self._abandoned = False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="wavebus-receive")
        return self._thread

    def _in_own_stream(self) -> AbstractContextManager[None]:
        if self._stream is None:
            self._stream = own_stream(self._device)
        return within(self._stream, self._device)


def _fetch(
    receiver: Receiver, metas: tuple[TensorMeta, ...], handle: bytes, into: ReceivedChunk | None
) -> Tensors:
    """Receives a chunk into the given memory if the receiver can; otherwise into its own."""
    if into is not None and receiver.receive_into(metas, handle, into):
        return into
    return receiver.receive(metas, handle)
