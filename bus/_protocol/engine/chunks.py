"""Decides the next engine call for the chunks of an update: the sidecar's side.

::

    message            condition                                  operation, ack
    WEIGHT_CHUNK_META  the engine has room for chunk k            receive(k)
    CHUNK_SENT k       receive(k) is queued, and every chunk      load(k, verify); ack chunk k
                       before k was sent
    the same, with a   receive(k) has returned                    none: receive has loaded it;
    vLLM transport                                                ack chunk k

An engine has room for ``prefetch_depth`` chunks that are received and not loaded: with two, one is
loaded while the next one is received. A message ahead of its turn is dropped: an earlier one was
lost, and the broker repeats all. A chunk that is applied is acknowledged each time it is requested.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from bus._manifest import NO_TENSORS
from bus._protocol.core.failures import wrong_state
from bus._protocol.core.validation import check_chunk, check_sums, manifest_of, part_of
from bus._protocol.engine.calls import CallQueue, SessionEffect, ack
from bus._vllm.payloads import is_loaded_on_receipt
from bus.messages import ChunkSent, Step, WeightChunkMeta
from bus.operations import LoadChunk, ReceiveChunk

if TYPE_CHECKING:
    from bus._manifest import Manifest
    from bus.messages import Arm, ArmPart


class EngineChunks:
    """Tracks the chunks of an update, and adds their engine calls to ``queue``.

    Attributes:
        applied: how many chunks are loaded.
        parts: how many parts of the manifest have been armed.
        prefetch_depth: how many chunks the open transport may receive before they are loaded.
        staged: whether chunks are loaded into spare memory.
    """

    def __init__(self, queue: CallQueue) -> None:
        self.applied = 0
        self.parts = 1
        self.prefetch_depth = 1
        self.staged = False
        self._queue = queue
        self._update_id = ""
        self._backend = ""
        self._manifest = NO_TENSORS  # of the armed update
        self._known: dict[str, Manifest] = {}  # by digest
        self._joined = NO_TENSORS  # the manifest with the part that is being checked
        # How many chunks are announced (WEIGHT_CHUNK_META), sent (CHUNK_SENT) and received. The two
        # queues hold the messages whose receive or load can't be queued yet.
        self._ack_received = self._sent = self._received = 0
        self._metas: deque[tuple[int, WeightChunkMeta]] = deque()
        self._checks: deque[tuple[int, ChunkSent]] = deque()

    def manifest_of(self, message: Arm) -> Manifest:
        """Returns the manifest of an ARM; see :func:`bus._protocol.core.validation.manifest_of`."""
        return manifest_of(message, self._known)

    def begin(self, message: Arm, manifest: Manifest) -> None:
        """Starts with the first chunk of the update that an ARM describes."""
        self._update_id = message.update_id
        self._backend = message.backend
        self._manifest = manifest
        self.applied, self.parts = 0, 1
        self.discard()

    def extend(self, message: ArmPart) -> Manifest | None:
        """Returns the manifest of an open update's next part; None: chunks are pending.

        Raises:
            Declined: the part is not the next one, or contradicts the parts before.
        """
        if not self._manifest.is_open or message.part != self.parts:
            text = f"part {message.part} is out of order: part {self.parts} is next"
            raise wrong_state(text, "part")
        if self.applied < self.total:  # a CHUNK_SENT was lost: the broker repeats it
            return None
        part, self._joined = part_of(self._manifest, message)
        return part

    def on_extended(self) -> None:
        """Records that the engine has accepted the part that :meth:`extend` returned."""
        self.parts += 1
        self._manifest = self._joined

    def discard(self) -> None:
        """Discards all chunks that are announced, sent or received, but not loaded."""
        self._ack_received = self._sent = self._received = self.applied
        self._metas.clear()
        self._checks.clear()

    @property
    def total(self) -> int:
        """The number of chunks of the update, as far as its manifest is known."""
        return self._manifest.chunks

    @property
    def has_sent_all(self) -> bool:
        """Whether the trainer has sent the last chunk, so that only engine calls are pending."""
        return self._sent == self.total

    def is_new(self, message: WeightChunkMeta | ChunkSent) -> bool:
        """Returns whether a chunk's message has not been received before."""
        following = self._ack_received if isinstance(message, WeightChunkMeta) else self._sent
        return message.chunk >= following

    def take(self, msg_id: int, message: WeightChunkMeta | ChunkSent) -> list[SessionEffect]:
        """Handles a WEIGHT_CHUNK_META or CHUNK_SENT: queues the chunk's engine calls.

        A chunk that is loaded already is acknowledged again. A message ahead of its turn is
        dropped.

        Args:
            msg_id: the message's id, which the ACK names.
            message: the message.

        Raises:
            Declined: there is no such chunk, or it is of another manifest.
        """
        if message.chunk >= self.total:
            text = f"there is no chunk {message.chunk}; the update has {self.total}, from 0"
            raise wrong_state(text, "chunk")
        if message.chunk < self.applied:
            return [ack(msg_id, Step.CHUNK, self._update_id, chunk=message.chunk)]
        if isinstance(message, WeightChunkMeta) and message.chunk == self._ack_received:
            check_chunk(self._manifest, message)
            self._ack_received += 1
            self._metas.append((msg_id, message))
        elif isinstance(message, ChunkSent) and message.chunk == self._sent < self._ack_received:
            check_sums(self._manifest, message)
            self._sent += 1
            self._checks.append((msg_id, message))
        return self._go_on()

    def on_received(self) -> list[SessionEffect]:
        """Records that a receive call has returned, and queues the next receive and load calls."""
        self._received += 1
        return self._go_on()

    def on_loaded(self) -> None:
        """Records that a load call has returned."""
        self.applied += 1

    def _go_on(self) -> list[SessionEffect]:
        """Queues the receives and loads whose turn has come; returns ACKs of loaded chunks."""
        acks: list[SessionEffect] = []
        theirs = is_loaded_on_receipt(self._backend)
        while True:
            received, passed = self._ack_received - len(self._metas), self._sent - len(self._checks)
            if self._metas and received - passed < (1 if theirs else self.prefetch_depth):
                msg_id, meta = self._metas.popleft()
                chunk = meta.chunk, self._backend, meta.handle, self._update_id
                self._queue.add(ReceiveChunk(*chunk, staged=self.staged), msg_id)
            elif theirs and self._checks and passed < self._received:
                msg_id, sent = self._checks.popleft()
                self.applied += 1
                acks.append(ack(msg_id, Step.CHUNK, self._update_id, chunk=sent.chunk))
            elif not theirs and self._checks and passed < received:
                msg_id, sent = self._checks.popleft()
                load = LoadChunk(sent.chunk, sent.verify, sent.sums, staged=self.staged)
                self._queue.add(load, msg_id)
            else:
                return acks
