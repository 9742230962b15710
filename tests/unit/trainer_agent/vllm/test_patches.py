"""Patches that tell what they are when they were read, and are refused before anybody is asked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from bus._manifest import TensorMeta
from bus.errors import UsageError
from trainer_agent._vllm import native_payloads
from trainer_agent._vllm.patches import BusPatches, NextPatch


@dataclass
class Patch:
    """As vLLM's ``SparseWeightPatch``."""

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: tuple[int, ...]


def patch(name: str, indices: list[int], shape: tuple[int, ...] = (2, 3)) -> Patch:
    return Patch(name, torch.tensor(indices, dtype=torch.int32), torch.ones(len(indices)), shape)


A, B = patch("a", [5, 0]), patch("b", [])


def test_what_was_read_is_what_engines_are_armed_with() -> None:
    """Not before all of it was; and once."""
    following = NextPatch()
    reading = iter(BusPatches([A, B], 7, following))
    assert next(reading) is A
    assert next(reading) is B
    with pytest.raises(UsageError, match=r"trainer.send_weights\(agent.patches\(patches\)\)"):
        following.take()
    assert list(reading) == []
    plan = following.take()
    assert plan.metas == [TensorMeta("a", "float32", (2, 3)), TensorMeta("b", "float32", (2, 3))]
    assert (plan.base, plan.manifest.counts, plan.chunks) == (7, (2, 0), 1)
    assert plan.size_bytes == 2 * (4 + 4)
    with pytest.raises(UsageError, match="no patches were read"):
        following.take()


@pytest.mark.parametrize("then", [[], [A, A]])
def test_an_earlier_patch_is_forgotten(then: list[Patch]) -> None:
    """By one that is empty, and by one that is refused."""
    following = NextPatch()
    list(BusPatches([A], 7, following))
    if then:
        with pytest.raises(UsageError, match="a appears twice"):
            list(BusPatches(then, 7, following))
    else:
        list(BusPatches(then, 7, following))
    with pytest.raises(UsageError, match="no patches were read"):
        following.take()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (patch("b", [0, 6]), "b: an index outside"),
        (patch("b", [-1]), "b: an index outside"),
        (patch("b", [4, 1, 4]), "b: an index that appears twice"),
        (Patch("b", torch.tensor([1]), torch.tensor([torch.nan]), (2, 3)), "b: NaN"),
        (patch("b", [0, 1, 2, 3, 4, 5, 5]), "b.*7 elements|7 elements of b"),
        (patch("a", [0]), "a appears twice"),
    ],
)
def test_what_workers_would_refuse_too_late_is_refused_by_name(wrong: Patch, text: str) -> None:
    following = NextPatch()
    with pytest.raises(UsageError, match=f"patches: .*({text})"):
        list(BusPatches([A, wrong], 7, following))


def test_without_a_base_there_is_no_patch() -> None:
    """Whoever does not read it, does not hear of it."""
    for base in (0, -1):
        unread = BusPatches([A], base, NextPatch())
        with pytest.raises(UsageError, match=r"has committed none.*update_weights\(\) first"):
            next(iter(unread))


def test_a_chunk_of_a_patch_is_the_one_that_was_armed() -> None:
    """Its tensors, and how many elements of each."""
    following = NextPatch()
    list(BusPatches([A, B], 7, following))
    plan = following.take()
    info = {
        "names": ["a", "b"],
        "dtype_names": ["float32", "float32"],
        "shapes": [[2, 3], [2, 3]],
        "num_updates_list": [2, 0],
    }
    meta, sent = native_payloads.chunk_messages(info, plan, 0, "u1")
    assert (meta.digest, sent.sums) == (plan.manifest.digest, ())
    assert plan.manifest.sizes_bytes(0) == (16, 0)
    with pytest.raises(UsageError, match="other num_updates_list than were armed"):
        native_payloads.chunk_messages(info | {"num_updates_list": [2, 1]}, plan, 0, "u1")
