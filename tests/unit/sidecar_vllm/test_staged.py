"""The next weights beside those that serve: on a small model, with its own loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.vllm_plugin.copy_plan import NoPlanError, make_plan
from sidecar.vllm_plugin.loader_trace import storage_of
from sidecar.vllm_plugin.staged import StagedWeights
from tests.unit.sidecar_vllm._small_model import trace_of
from tests.unit.sidecar_vllm.test_plans import CPU, Serving, all_weights, packed_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from sidecar.vllm_plugin.copy_plan import CopyPlan


class Staging:
    """What a worker does with them, without vLLM."""

    def __init__(self) -> None:
        self.model = Serving()
        self.model.load_weights(all_weights(0).items())
        linear = self.model.linear
        linear.quant_method.process_weights_after_loading(linear)
        self.meta = Serving("meta")
        self.plan = self.plan_of(self.meta)
        self.weights = StagedWeights(self.model, CPU)

    @staticmethod
    def plan_of(meta: Serving) -> CopyPlan:
        new = all_weights(0)
        return make_plan(trace_of(meta, new), unloaded="")

    def stage(self, new: Mapping[str, Tensor], chunks: int = 3) -> None:
        pairs = list(new.items())
        step = -(-len(pairs) // chunks)
        for start in range(0, len(pairs), step):
            self.weights.stage(pairs[start : start + step])

    def prove(self, new: Mapping[str, Tensor], meta: Serving | None = None) -> None:
        """By the loaders of a model on meta."""
        meta = meta or self.meta
        names = {storage_of(each): name for name, each in meta.named_buffers()}
        names |= {storage_of(each): name for name, each in meta.named_parameters()}
        self.weights.prove(list(new.items()), meta.load_weights, names)

    def snapshot(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.model.state_dict().items()}


def served(seed: int) -> dict[str, Tensor]:
    """What a model has, that has loaded these."""
    model = Serving()
    model.load_weights(all_weights(seed).items())
    return {name: each.clone() for name, each in model.state_dict().items()}


def test_nothing_changes_before_the_swap_and_then_all_does() -> None:
    """Fused, sharded, turned, padded, of experts, a buffer; and a layer that repacks."""
    tested = Staging()
    before = tested.snapshot()
    packed = tested.model.linear.packed.clone()
    tested.weights.begin(tested.plan)
    tested.stage(all_weights(5))
    tested.weights.seal()
    tested.weights.need_sealed()
    assert all(torch.equal(before[name], now) for name, now in tested.snapshot().items())
    assert torch.equal(packed, tested.model.linear.packed)
    places = {name: each.data_ptr() for name, each in tested.model.named_parameters()}
    tested.weights.swap(tested.weights.need_sealed())
    new = served(5)
    for name, now in tested.snapshot().items():
        if name != "linear.weight":
            assert torch.equal(now, new[name]), name
    assert torch.equal(tested.model.linear.packed, packed_of(5))
    assert {name: each.data_ptr() for name, each in tested.model.named_parameters()} == places


def test_memory_is_kept_or_not() -> None:
    """As much as all that is filled."""
    tested = Staging()
    assert tested.weights.held_bytes == 0
    tested.weights.begin(tested.plan)
    needed = sum(torch.Size(t.shape).numel() * 4 for t in tested.plan.targets.values())
    assert tested.weights.held_bytes == needed
    memory = {each.data_ptr() for each in tested.weights._memory.tensors.values()}
    tested.weights.let_go(keep=True)
    assert (tested.weights.begun, tested.weights.held_bytes) == (False, needed)
    tested.weights.begin(tested.plan)
    assert {each.data_ptr() for each in tested.weights._memory.tensors.values()} == memory
    tested.weights.let_go(keep=False)
    assert tested.weights.held_bytes == 0


def test_what_is_not_all_there_is_not_swapped_in() -> None:
    """Nor what an update before has left in the memory."""
    tested = Staging()
    with pytest.raises(EngineError) as none:
        tested.weights.need_sealed()
    assert none.value.code is NackCode.CALLED_OFF
    tested.weights.begin(tested.plan)
    tested.stage(all_weights(5))
    tested.weights.let_go(keep=True)
    tested.weights.begin(tested.plan)
    new = all_weights(6)
    last = new.popitem()
    tested.stage(new)
    with pytest.raises(EngineError, match="elements are not staged"):
        tested.weights.seal()
    with pytest.raises(EngineError, match="not all"):
        tested.weights.need_sealed()
    tested.weights.stage([last])
    tested.weights.seal()
    tested.weights.need_sealed()


def test_a_model_that_is_not_where_the_plan_wants_it_is_refused() -> None:
    """When it begins, and once more before the swap."""
    tested = Staging()
    tested.weights.begin(tested.plan)
    tested.stage(all_weights(5))
    tested.weights.seal()
    tested.model.norm = nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(NoPlanError, match="norm"):
        tested.weights.need_sealed()
    with pytest.raises(NoPlanError, match="norm"):
        tested.weights.begin(tested.plan)


def test_the_first_update_is_proven_by_the_loader() -> None:
    """Which is run over what has arrived, and touches no model that serves."""
    tested = Staging()
    before = tested.snapshot()
    new = all_weights(5)
    tested.weights.begin(tested.plan)
    tested.stage(new)
    tested.prove(new)
    assert all(torch.equal(before[name], now) for name, now in tested.snapshot().items())


@pytest.mark.parametrize("fault", ["another place", "another value", "left out", "more"])
def test_a_plan_that_is_not_what_the_loader_does_is_found(fault: str) -> None:
    """A loader that goes by values, for one: the plan was made without any."""
    tested = Staging()
    new = all_weights(5)
    tested.weights.begin(tested.plan)
    tested.stage(new)
    meta: Any = tested.meta
    right = meta.loaders["norm"]
    match fault:
        case "another place":
            meta.loaders["k"] = meta.loaders["v"]
        case "another value":
            meta.loaders["norm"] = lambda m, tensor: right(m, tensor + 1)
        case "left out":
            meta.loaders["norm"] = lambda _m, _tensor: None
        case _:
            meta.extra = nn.Parameter(torch.empty(8, device="meta"), requires_grad=False)
            meta.loaders["norm"] = lambda m, tensor: (
                right(m, tensor),
                m.extra.data.copy_(tensor),
            )
    with pytest.raises(EngineError, match="not what the loader does"):
        tested.prove(new)
