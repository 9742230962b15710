"""Experts of a mixture that are sent and loaded by no engine: nothing is dropped in silence."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin import agreement
from sidecar._vllm.plugin.loading import manifest_check
from sidecar._vllm.plugin.loading.manifest_check import Blueprint, ManifestChecker
from tests.unit.sidecar.vllm.plugin.loading._small_model import manifest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

EXPERTS, INNER, HIDDEN = 4, 3, 2
LAYER = "model.layers.0.mlp."
STACKED = f"{LAYER}experts.gate_up_proj"


class Mixture(nn.Module):
    """A layer with the experts of one engine; its loader passes over others, as vLLM's do."""

    def __init__(self, own: range) -> None:
        super().__init__()
        self.own = own
        empty = torch.empty(len(own), 2 * INNER, HIDDEN, device="meta")
        self.gate_up = nn.Parameter(empty, requires_grad=False)

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            if name == STACKED:
                self.gate_up.copy_(tensor[self.own.start : self.own.stop])
                continue
            one = re.fullmatch(r".*\.experts\.(\d+)\.(gate|up)_proj\.weight", name)
            if one is None or int(one[1]) not in self.own:
                continue
            local = self.gate_up[self.own.index(int(one[1]))]
            local.chunk(2)[one[2] == "up"].copy_(tensor)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has one worker, and no vLLM is needed."""
    monkeypatch.setattr(agreement, "_groups", lambda: iter(()))
    monkeypatch.setattr(manifest_check, "quiet_loading", nullcontext)


def check(tensors: dict[str, Tensor], rank: int = 0, ranks: int = 1) -> None:
    """Whether these fill the engine of one rank of a DP group, which shares its experts."""
    checker(rank, ranks).check(manifest_of(tensors))


def checker(rank: int = 0, ranks: int = 1) -> ManifestChecker:
    """Of that engine."""
    parallel = SimpleNamespace(
        world_size=1,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        enable_expert_parallel=ranks > 1,
    )
    model: Any = SimpleNamespace(dtype=torch.float32, get_num_experts=lambda: EXPERTS)
    config = SimpleNamespace(parallel_config=parallel)
    own = range(EXPERTS * rank // ranks, EXPERTS * (rank + 1) // ranks)
    made = ManifestChecker(Blueprint(config, model, quantised=False), nn.Module(), "")
    made._model = Mixture(own)
    return made


def split(experts: int = EXPERTS) -> dict[str, Tensor]:
    """One tensor of each expert's projection, as most checkpoints have them."""
    return {
        f"{LAYER}experts.{expert}.{name}_proj.weight": torch.empty(INNER, HIDDEN)
        for expert in range(experts)
        for name in ("gate", "up")
    }


def stacked(experts: int = EXPERTS) -> dict[str, Tensor]:
    """All experts of the layer in one fused tensor."""
    return {STACKED: torch.empty(experts, 2 * INNER, HIDDEN)}


WHERE = [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(("rank", "ranks"), WHERE)
@pytest.mark.parametrize("tensors", [split(), stacked()], ids=["split", "stacked"])
def test_experts_of_other_engines_are_no_loss(
    tensors: dict[str, Tensor], rank: int, ranks: int
) -> None:
    check(tensors, rank, ranks)


@pytest.mark.parametrize(("rank", "ranks"), WHERE)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{LAYER}experts.{EXPERTS}.gate_proj.weight", (INNER, HIDDEN)),
        (f"{LAYER}experts.{EXPERTS - 1}.gate_proj.bias", (INNER,)),
        (f"{LAYER}shared_expert.gate_proj.weight", (INNER, HIDDEN)),
    ],
    ids=["one-too-many", "of-another-kind", "shared"],
)
def test_a_tensor_that_no_engine_loads_is_refused(
    name: str, shape: tuple[int, ...], rank: int, ranks: int
) -> None:
    with pytest.raises(EngineError, match="would drop it silently") as refused:
        check({**split(), name: torch.empty(shape)}, rank, ranks)
    assert (refused.value.code, refused.value.tensor) == (NackCode.MANIFEST_REFUSED, name)


def test_an_expert_of_another_engine_has_the_shape_of_the_others() -> None:
    """Its engine would refuse it; this one does not wait for that."""
    name = f"{LAYER}experts.{EXPERTS - 1}.up_proj.weight"
    with pytest.raises(EngineError, match="would drop it silently") as refused:
        check({**split(), name: torch.empty(INNER + 1, HIDDEN)}, 0, 2)
    assert refused.value.tensor == name


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_a_stack_of_more_experts_than_the_model_has_is_refused(rank: int, ranks: int) -> None:
    """By a lone engine, or by the one that has the last experts: the update is armed by all."""
    with pytest.raises(EngineError, match=r"takes only|no shard takes") as refused:
        check(stacked(EXPERTS + 1), rank, ranks)
    assert (refused.value.code, refused.value.tensor) == (NackCode.MANIFEST_REFUSED, STACKED)


def test_tensors_that_come_in_parts_are_checked_part_by_part_and_counted_at_the_end() -> None:
    """Each part is given to the loader once, and the last one may be missing until the end."""
    sent = list(split().items())
    checked, fed = checker(), list[str]()
    model: Any = checked._model
    load = model.load_weights

    def note(pairs: Iterable[tuple[str, Tensor]]) -> None:
        received = list(pairs)
        fed.extend(name for name, _ in received)
        load(received)

    model.load_weights = note
    known = replace(manifest_of(dict(sent[:3])), is_open=True)
    checked.check(known)
    for one in sent[3:]:
        with pytest.raises(EngineError, match="missing: the manifest fills") as refused:
            checked.check_whole(known)
        assert refused.value.code is NackCode.MANIFEST_REFUSED
        joined = known.join(manifest_of(dict([one])))
        checked.check(joined, known)
        known = joined
    checked.check_whole(known)
    assert fed == [name for name, _ in sent]


@pytest.mark.parametrize("name", ["unknown", f"{LAYER}experts.0.up_proj.bias"])
def test_a_part_with_a_tensor_that_no_engine_loads_is_refused(name: str) -> None:
    """As in a first part; and the manifest before it can be checked again."""
    checked = checker()
    known = replace(manifest_of(dict(list(split().items())[:3])), is_open=True)
    for _ in range(2):
        checked.check(known)
        with pytest.raises(EngineError, match="would drop it silently") as refused:
            checked.check(known.join(manifest_of({name: torch.empty(INNER)})), known)
        assert refused.value.tensor == name
