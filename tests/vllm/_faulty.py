"""What fails on purpose, put into vLLM's workers by a plugin of the tests: a transport, and a
copy plan that is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bus._weight_transfer.registry import register_receiver
from bus._weight_transfer.shm import ShmReceiver
from sidecar._vllm.plugin.loading import plan_cache
from sidecar._vllm.plugin.loading.copy_plan import make_plan

if TYPE_CHECKING:
    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import RankAssignment
    from sidecar._vllm.plugin.loading.copy_plan import CopyPlan
    from sidecar._vllm.plugin.loading.loader_trace import LoaderTrace

# A manifest that begins with this tensor gets a plan that takes keys for values.
MISLEADING = "model.layers.1.input_layernorm.weight"


class Poisoned(torch.Tensor):
    """Looks right, moves between devices, and can't be cut or copied into a parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.narrow, torch.Tensor.copy_, torch._foreach_copy_):
            raise RuntimeError("poisoned on purpose")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class FaultyReceiver(ShmReceiver):
    """Delivers what was announced, but loading the last tensor of a chunk fails in vLLM."""

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        received = super().receive(tensors, handle)
        name, tensor = received[-1]
        return [*received[:-1], (name, tensor.as_subclass(Poisoned))]


class OneSidedReceiver(ShmReceiver):
    """Of two workers, the second one gets something else than was sent."""

    def open(self, params: bytes, place: RankAssignment) -> None:
        super().open(params, place)
        self._second = place.rank % 2 == 1

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        received = super().receive(tensors, handle)
        if not self._second:
            return received
        name, tensor = received[-1]
        return [*received[:-1], (name, -tensor)]


def _plan(trace: LoaderTrace, *, unloaded: str) -> CopyPlan:
    plan = make_plan(trace, unloaded=unloaded)
    if trace.metas[0].name != MISLEADING:
        return plan
    keys = [name for name in plan.copies if name.endswith("k_proj.weight")]
    pairs = [(name, name.replace("k_proj", "v_proj")) for name in keys]
    swapped = {name: plan.copies[other] for pair in pairs for name, other in (pair, pair[::-1])}
    return replace(plan, copies={**plan.copies, **swapped})


def register() -> None:
    """vLLM calls this in every process."""
    module: Any = plan_cache
    module.make_plan = _plan
    register_receiver("faulty", FaultyReceiver)
    register_receiver("one-sided", OneSidedReceiver)
