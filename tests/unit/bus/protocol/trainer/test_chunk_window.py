"""The chunks of an update on their way, trainer's side."""

from __future__ import annotations

import random

import pytest

from bus._protocol.core.state_table import IllegalTransition
from bus._protocol.trainer.chunk_window import ChunkWindow


def test_a_chunk_waits_for_a_buffer_until_an_earlier_one_is_applied() -> None:
    window = ChunkWindow(3, 2, frees_early=False)
    window.on_announced(0)
    window.on_announced(1)
    window.on_left(0)
    window.on_sent(0)
    assert not window.has_room(2)
    with pytest.raises(IllegalTransition, match="no buffer"):
        window.on_announced(2)
    window.on_applied(0)
    assert window.has_room(2)
    window.on_announced(2)


def test_where_engines_have_memory_for_it_a_buffer_is_free_when_its_chunk_has_left() -> None:
    window = ChunkWindow(3, 2, frees_early=True)
    window.on_announced(0)
    window.on_announced(1)
    assert not window.has_room(2)
    window.on_left(0)
    assert window.has_room(2)


def test_what_has_left_is_said_in_the_order_of_the_chunks() -> None:
    """Also if a later one leaves first; and all is sent when the last one is said."""
    window = ChunkWindow(2, 2, frees_early=False)
    window.on_announced(0)
    window.on_announced(1)
    window.on_left(1)
    assert not window.is_next_sent(1)
    with pytest.raises(IllegalTransition, match="out of turn"):
        window.on_sent(1)
    window.on_left(0)
    window.on_sent(0)
    assert not window.has_sent_all
    assert window.is_next_sent(1)
    window.on_sent(1)
    assert window.has_sent_all


@pytest.mark.parametrize("frees_early", [False, True])
def test_every_order_sends_all_and_holds_no_more_than_the_buffers(*, frees_early: bool) -> None:
    """Chunks leave and are applied as it happens; never are more on their way than there are
    buffers, and nobody waits for ever."""
    for seed in range(200):
        rng = random.Random(seed)
        chunks, depth = rng.randint(1, 8), rng.randint(1, 4)
        window = ChunkWindow(chunks, depth, frees_early=frees_early)
        announced, left, sent, applied = 0, set[int](), 0, set[int]()
        while len(applied) < chunks:
            moves = [("leave", seq) for seq in range(announced) if seq not in left]
            moves += [("apply", seq) for seq in range(sent) if seq not in applied]
            if announced < chunks and window.has_room(announced):
                moves.append(("announce", announced))
            if sent < announced and window.is_next_sent(sent):
                moves.append(("send", sent))
            move, seq = rng.choice(moves)
            if move == "announce":
                window.on_announced(seq)
                announced += 1
            elif move == "leave":
                window.on_left(seq)
                left.add(seq)
            elif move == "send":
                window.on_sent(seq)
                sent += 1
            else:
                window.on_applied(seq)
                applied.add(seq)
            freed = left if frees_early else applied
            oldest = next((seq for seq in range(announced) if seq not in freed), announced)
            assert announced - oldest <= depth
            assert window.has_sent_all == (sent == chunks)
