"""Limits how many chunks of an update are in flight, and keeps their order.

Invariants:

- At most ``depth`` chunks occupy a buffer: each from its announcement until it is applied or, if
  engines have memory of their own to receive into, until its bytes are sent.
- Chunks are announced in their order, and so are the messages that say that they are sent. The
  bytes may be sent in another order.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from bus._protocol.core.state_table import IllegalTransition, StateMachine


class ChunkState(StrEnum):
    """Progress of a chunk."""

    WAITING = "waiting"
    ANNOUNCED = "announced"
    LEFT = "left"
    SENT = "sent"
    APPLIED = "applied"


class ChunkEvent(StrEnum):
    ANNOUNCED = "announced"
    LEFT = "left"
    SENT = "sent"
    APPLIED = "applied"


_S, _E = ChunkState, ChunkEvent

TRANSITIONS: Final[dict[tuple[ChunkState, ChunkEvent], ChunkState]] = {
    # WEIGHT_CHUNK_META is requested: a buffer is free for the chunk.
    (_S.WAITING, _E.ANNOUNCED): _S.ANNOUNCED,
    (_S.ANNOUNCED, _E.LEFT): _S.LEFT,  # the sender has sent the chunk's bytes
    (_S.LEFT, _E.SENT): _S.SENT,  # CHUNK_SENT is requested, after the previous chunk's
    (_S.SENT, _E.APPLIED): _S.APPLIED,  # both messages are answered
}

_UNSENT: Final = frozenset({_S.WAITING, _S.ANNOUNCED, _S.LEFT})


class _Chunk(StateMachine[ChunkState, ChunkEvent]):
    """The state machine of one chunk."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"chunk {seq}", TRANSITIONS, _S.WAITING)

    def go(self, event: ChunkEvent) -> None:
        self._go(event)

    def refuse(self, why: str) -> IllegalTransition:
        return self._illegal(why)


class ChunkWindow:
    """Tracks the states of all chunks of one update.

    Args:
        depth: the number of buffers that the sender has.
        frees_early: True: a chunk's buffer is free as soon as the chunk's bytes are sent. False:
            the buffer is free when every engine has applied the chunk.
    """

    def __init__(self, chunks: int, depth: int, *, frees_early: bool) -> None:
        self._chunks = [_Chunk(seq) for seq in range(chunks)]
        self._depth = depth
        self._freed = {_S.LEFT, _S.SENT, _S.APPLIED} if frees_early else {_S.APPLIED}

    @property
    def has_sent_all(self) -> bool:
        """Whether CHUNK_SENT was sent for every chunk, so that engines may finish."""
        return _UNSENT.isdisjoint(chunk.state for chunk in self._chunks)

    def has_room(self, seq: int) -> bool:
        """Returns whether a buffer is free for a chunk, after each earlier chunk has its own."""
        return seq < self._depth or self._chunks[seq - self._depth].state in self._freed

    def is_next_sent(self, seq: int) -> bool:
        """Returns whether CHUNK_SENT of this chunk may be sent now."""
        before = self._chunks[seq - 1].state if seq else None
        return self._chunks[seq].state is _S.LEFT and before not in _UNSENT

    def on_announced(self, seq: int) -> None:
        """Records that the chunk's WEIGHT_CHUNK_META is sent."""
        if not self.has_room(seq):
            raise self._chunks[seq].refuse("no buffer is free")
        self._chunks[seq].go(_E.ANNOUNCED)

    def on_left(self, seq: int) -> None:
        """Records that the sender has sent the chunk's bytes."""
        self._chunks[seq].go(_E.LEFT)

    def on_sent(self, seq: int) -> None:
        """Records that the chunk's CHUNK_SENT is sent."""
        if not self.is_next_sent(seq):
            raise self._chunks[seq].refuse("sent out of turn")
        self._chunks[seq].go(_E.SENT)

    def on_applied(self, seq: int) -> None:
        """Records that all engines that are still in the update have applied chunk ``seq``."""
        self._chunks[seq].go(_E.APPLIED)
