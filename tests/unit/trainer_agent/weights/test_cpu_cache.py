"""Weights that were copied are sent as they were, whatever becomes of the originals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from bus._manifest import TensorMeta
from bus._weight_transfer.shm import locate
from bus.errors import UsageError
from trainer_agent._weights.cpu_cache import CpuCache

if TYPE_CHECKING:
    from collections.abc import Iterator


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), value), "b": torch.full((4,), value, dtype=torch.bfloat16)}


def test_what_was_stored_stays_as_it_was() -> None:
    """And is told of as it is: dtypes, shapes, order, size."""
    original = weights(1.0)
    cache = CpuCache(original)
    original["a"].zero_()
    stored = dict(cache)
    assert list(stored) == ["a", "b"]
    assert torch.equal(stored["a"], torch.ones(2, 3))
    assert cache.metadata() == [
        TensorMeta("a", "float32", (2, 3)),
        TensorMeta("b", "bfloat16", (4,)),
    ]
    assert cache.size_bytes == 2 * 3 * 4 + 4 * 2


def test_memory_is_used_again_for_the_same_tensors() -> None:
    cache = CpuCache(weights(1.0))
    places = [tensor.data_ptr() for _, tensor in cache]
    cache.store(weights(2.0))
    assert [tensor.data_ptr() for _, tensor in cache] == places
    assert torch.equal(dict(cache)["a"], torch.full((2, 3), 2.0))
    cache.store({"a": torch.ones(5)})
    assert [name for name, _ in cache] == ["a"]


def test_a_shared_one_lies_in_one_piece_of_shared_memory() -> None:
    """Until it has to be another, with other tensors."""
    cache = CpuCache(weights(1.0), shared=True)
    [first] = {locate(tensor)[0] for _, tensor in cache}
    cache.store(weights(2.0))
    stored = dict(cache)
    assert torch.equal(stored["a"], torch.full((2, 3), 2.0))
    assert torch.equal(stored["b"], torch.full((4,), 2.0, dtype=torch.bfloat16))
    assert {locate(tensor)[0] for tensor in stored.values()} == {first}
    cache.store({"a": torch.ones(5), "empty": torch.empty(0, 3)})
    assert [tuple(tensor.shape) for _, tensor in cache] == [(5,), (0, 3)]
    assert locate(dict(cache)["a"])[0] != first


def test_nothing_is_replaced_while_it_is_read() -> None:
    """A pass that is left ends, too."""
    cache = CpuCache(weights(1.0))
    reading = iter(cache)
    next(reading)
    with pytest.raises(UsageError, match="await the update"):
        cache.store(weights(2.0))
    del reading
    cache.store(weights(2.0))


def test_a_cache_without_weights_is_none_to_send() -> None:
    cache = CpuCache()
    with pytest.raises(UsageError, match="empty"):
        cache.metadata()
    with pytest.raises(UsageError, match="empty"):
        next(iter(cache))


class Ends:
    """A source that ends before its metadata does."""

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta("a", "float32", (2, 3)), TensorMeta("b", "float32", (1,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2, 3)


def test_a_source_that_breaks_off_leaves_nothing_to_send() -> None:
    """Half of it is new."""
    cache = CpuCache(weights(1.0))
    with pytest.raises(UsageError, match="ended before b"):
        cache.store(Ends())
    with pytest.raises(UsageError, match="empty"):
        cache.metadata()
    cache.store(weights(3.0))
    assert torch.equal(dict(cache)["a"], torch.full((2, 3), 3.0))


def test_other_ranks_gather_and_keep_nothing() -> None:
    """They tell of the same tensors, and have none of them."""
    cache = CpuCache(weights(1.0), keep=False)
    assert len(cache.metadata()) == 2
    assert cache.size_bytes == 0
    assert list(cache) == []
