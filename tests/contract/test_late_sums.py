"""Chunks that are looked at as they come, and found to be what was sent when the last one has."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bus._weight_transfer.checksum import checksums
from bus._weight_transfer.packing import ViewCache, packed_offsets
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._transfer import verification
from sidecar._transfer.verification import DeferredSums
from trainer_agent._weights.source import meta_of

METAS = (meta_of("a", torch.zeros(3, 40)), meta_of("b", torch.zeros(500)))


class Buffer:
    """That chunks come into, one after the other."""

    def __init__(self) -> None:
        self._memory = torch.zeros(4096, dtype=torch.uint8)
        self._views = ViewCache()

    def chunk(self, seed: int) -> list[tuple[str, torch.Tensor]]:
        """As it is received: the same views again, with other values."""
        received = self._views.get(self._memory, packed_offsets(METAS)[:-1], METAS)
        for (_, tensor), value in zip(received, values(seed), strict=True):
            tensor.copy_(value)
        return received


class Rooms:
    """Of which each chunk has its own, in one memory, until all are looked at."""

    def __init__(self) -> None:
        self._size_bytes = packed_offsets(METAS)[-1]
        self._memory = torch.zeros(4 * self._size_bytes, dtype=torch.uint8)
        self._rooms = list(torch.split(self._memory, self._size_bytes))
        self._views = ViewCache()

    def chunk(self, seq: int, seed: int) -> list[tuple[str, torch.Tensor]]:
        """As it is received."""
        received = self._views.get(self._rooms[seq], packed_offsets(METAS)[:-1], METAS)
        for (_, tensor), value in zip(received, values(seed), strict=True):
            tensor.copy_(value)
        return received


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(meta.shape, generator=generator) for meta in METAS]


def sums(seed: int) -> tuple[int, ...]:
    return checksums(values(seed), "sample")


def test_chunks_that_are_what_was_sent_pass() -> None:
    """Though the buffer has others by then; and the next update's, after that."""
    late, buffer = DeferredSums(), Buffer()
    for update in range(3):
        for seq in range(4):
            seed = 10 * update + seq
            late.record(seq, buffer.chunk(seed), "sample", sums(seed))
        late.check()


@pytest.mark.parametrize("wrong", range(4))
def test_one_that_is_not_is_named(wrong: int) -> None:
    """With its tensor, when the last has come."""
    late, buffer = DeferredSums(), Buffer()
    for seq in range(4):
        late.record(seq, buffer.chunk(seq + 100 * (seq == wrong)), "sample", sums(seq))
    with pytest.raises(EngineError, match=f"a, in chunk {wrong}, is not what was sent") as found:
        late.check()
    assert (found.value.code, found.value.tensor) == (NackCode.CHECKSUM_MISMATCH, "a")
    late.check()  # it was told


@pytest.mark.parametrize("wrong", [None, *range(4)])
def test_chunks_that_stay_are_looked_at_when_the_last_has_come(wrong: int | None) -> None:
    """In one operation; as they are then."""
    late, rooms = DeferredSums(), Rooms()
    for update in range(3):
        for seq in range(4):
            received = rooms.chunk(seq, 10 * update + seq)
            late.record(seq, received, "sample", sums(10 * update + seq), stays=True)
        with _OneRead() as reads:  # type: ignore[no-untyped-call]
            late.check()
        assert reads.seen == 1
    for seq in range(4):
        late.record(seq, rooms.chunk(seq, seq), "sample", sums(seq), stays=True)
    if wrong is None:
        late.check()
        return
    rooms.chunk(wrong, 100)
    with pytest.raises(EngineError, match=f"a, in chunk {wrong}, is not what was sent"):
        late.check()


class _OneRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.ops.aten.index_select.default
        return func(*args, **(kwargs or {}))


def test_some_may_stay_and_others_not() -> None:
    late, rooms, buffer = DeferredSums(), Rooms(), Buffer()
    late.record(0, buffer.chunk(7), "sample", sums(7))
    late.record(1, rooms.chunk(0, 8), "sample", sums(8), stays=True)
    late.record(2, buffer.chunk(9), "sample", sums(9))
    late.check()
    late.record(0, buffer.chunk(7), "sample", sums(7))
    late.record(1, rooms.chunk(1, 8), "sample", sums(9), stays=True)
    with pytest.raises(EngineError, match="a, in chunk 1, is not what was sent"):
        late.check()


def test_what_was_given_up_is_not_asked_about() -> None:
    late, buffer = DeferredSums(), Buffer()
    late.record(0, buffer.chunk(1), "sample", sums(2))
    late.discard()
    late.check()


def test_many_are_summed_up_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take memory until then."""
    monkeypatch.setattr(verification, "_MOST_WORDS", 2 * 310)
    late, buffer = DeferredSums(), Buffer()
    late.record(0, buffer.chunk(9), "sample", sums(0))
    late.record(1, buffer.chunk(1), "sample", sums(1))
    with pytest.raises(EngineError, match="in chunk 0"):
        late.record(2, buffer.chunk(2), "sample", sums(2))


def test_what_will_not_lie_there_again_is_compared_at_once() -> None:
    """Nor is it, where all words are to be looked at."""
    late = DeferredSums()
    received = [(meta.name, tensor) for meta, tensor in zip(METAS, values(1), strict=True)]
    with pytest.raises(EngineError, match="a, in chunk 0"):
        late.record(0, received, "sample", sums(2))
    full = checksums(values(2), "full")
    with pytest.raises(EngineError, match="a, in chunk 0"):
        late.record(0, Buffer().chunk(1), "full", full)


def test_nothing_of_a_transport_that_is_gone_is_kept() -> None:
    """What makes the next look quick, is made of where the chunks lay."""

    class Memory(bytearray):
        """That goes when no tensor lies in it any more."""

    late, buffer, memory = DeferredSums(), Buffer(), Memory(4096)
    there = weakref.ref(memory)
    buffer._memory = torch.frombuffer(memory, dtype=torch.uint8)
    late.record(0, buffer.chunk(1), "sample", sums(1))
    late.check()
    del buffer, memory
    gc.collect()
    assert there() is not None
    late.close()
    gc.collect()
    assert there() is None
