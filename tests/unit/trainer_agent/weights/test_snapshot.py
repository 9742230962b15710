"""What is kept of updates: the last one that was committed, whole, and nothing of others."""

from __future__ import annotations

import torch

from trainer_agent._weights.snapshot import Snapshot, WeightsCopy
from trainer_agent._weights.source import meta_of


def weights(value: float, *, size: int = 4) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), value), "b": torch.full((2, 3), value + 1)}


def copied(snapshot: Snapshot, tensors: dict[str, torch.Tensor]) -> WeightsCopy:
    copy = snapshot.begin([meta_of(name, tensor) for name, tensor in tensors.items()])
    for place, tensor in enumerate(tensors.values()):
        copy.copy_from(place, [tensor])
    return copy


def kept(snapshot: Snapshot) -> dict[str, list[float]]:
    assert snapshot.kept is not None
    assert [meta.name for meta in snapshot.kept.metadata()] == ["a", "b"]
    return {name: tensor.flatten().tolist() for name, tensor in snapshot.kept}


def test_what_is_committed_is_kept() -> None:
    """As it was then, whatever becomes of the trainer's own; two copies from the second on."""
    snapshot = Snapshot()
    assert (snapshot.version, snapshot.memory_bytes) == (0, 0)
    own = weights(1.0)
    snapshot.on_committed(3, copied(snapshot, own))
    own["a"].zero_()
    assert kept(snapshot) == {"a": [1.0] * 4, "b": [2.0] * 6}
    assert (snapshot.version, snapshot.memory_bytes) == (3, 40)
    first = snapshot.kept
    snapshot.on_committed(4, copied(snapshot, weights(5.0)))
    assert kept(snapshot) == {"a": [5.0] * 4, "b": [6.0] * 6}
    assert (snapshot.version, snapshot.memory_bytes) == (4, 80)
    assert copied(snapshot, weights(9.0)) is first, "the same memory again"
    assert snapshot.memory_bytes == 80


def test_an_update_that_fails_spoils_nothing() -> None:
    """Neither the first that fails, nor one after it that fails in the middle."""
    snapshot = Snapshot()
    snapshot.on_committed(1, copied(snapshot, weights(1.0)))
    copied(snapshot, weights(7.0))
    half = snapshot.begin([meta_of(name, tensor) for name, tensor in weights(8.0).items()])
    half.copy_from(1, [weights(8.0)["b"]])
    assert kept(snapshot) == {"a": [1.0] * 4, "b": [2.0] * 6}
    assert snapshot.version == 1


def test_what_nobody_has_copied_outdates_it() -> None:
    """A patch, a draft, an adapter: until the next whole update nobody catches up from it."""
    snapshot = Snapshot()
    snapshot.on_committed(1, copied(snapshot, weights(1.0)))
    snapshot.on_committed(2, None)
    assert snapshot.version == 0
    snapshot.on_committed(3, copied(snapshot, weights(2.0)))
    assert snapshot.version == 3
    assert kept(snapshot) == {"a": [2.0] * 4, "b": [3.0] * 6}


def test_a_model_of_another_shape_takes_memory_of_its_own() -> None:
    snapshot = Snapshot()
    snapshot.on_committed(1, copied(snapshot, weights(1.0)))
    snapshot.on_committed(2, copied(snapshot, weights(2.0, size=5)))
    assert kept(snapshot)["a"] == [2.0] * 5
    assert snapshot.memory_bytes == 44, "the other's is let go"
