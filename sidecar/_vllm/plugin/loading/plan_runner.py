"""Loads updates by copy plans, and compares a plan with vLLM's loader.

Parameters are looked up by name whenever an update starts, because vLLM may have replaced or moved
parameters since the last one. When vLLM serves LoRA adapters, it inserts ``base_layer`` into names,
which the lookup ignores.

**Layers that repack.** On a CPU, vLLM converts the weights of most layers to another form after
they are loaded. Such a layer is filled in separate memory. When it is complete, vLLM's own method
post-processes it, as vLLM's reload does (``reload/layerwise.py``). On other devices unquantised
weights stay as they are loaded, so they are copied directly into the served parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidecar._vllm.plugin.loading.copy_plan import CopyBatch, part
from sidecar._vllm.plugin.loading.parameter_map import (
    as_tensors,
    find_parameters,
    repacked_by_module,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sidecar._vllm.plugin.loading.copy_plan import CopyPlan, PlanTarget
    from sidecar._vllm.plugin.loading.loader_trace import TracedFill

Received = list[tuple[str, torch.Tensor]]


class RepackedLayer:
    """Fills a layer that vLLM repacks: in separate memory, which vLLM then converts.

    Args:
        module: the layer.
        targets: shapes and dtypes of the layer's parameters as they are loaded, by their names in
            the layer.
    """

    def __init__(self, module: torch.nn.Module, targets: dict[str, PlanTarget]) -> None:
        self._module = module
        self._targets = targets
        self._missing = sum(torch.Size(target.shape).numel() for target in targets.values())
        self._filled: dict[str, torch.Tensor] = {}

    def memory(self, key: str, device: torch.device) -> torch.Tensor:
        """Returns the separate tensor to fill in place of a parameter."""
        if key not in self._filled:
            target = self._targets[key]
            self._filled[key] = torch.empty(target.shape, dtype=target.dtype, device=device)
        return self._filled[key]

    def note(self, numel: int) -> None:
        """Counts filled elements; when all are filled, makes vLLM convert them into the layer."""
        self._missing -= numel
        if not self._missing:
            filled, self._filled = self._filled, {}
            put(self._module, filled)


def put(module: torch.nn.Module, filled: dict[str, torch.Tensor]) -> None:
    """Makes vLLM convert loaded weights into the form in which a layer serves them.

    Args:
        module: a layer that vLLM repacks.
        filled: the loaded weights, by their names in the layer.
    """
    own: dict[str, Any] = module._parameters  # noqa: SLF001 - its own, no child's
    kept = {key: own[key] for key in filled}
    try:
        for key, tensor in filled.items():
            own[key] = torch.nn.Parameter(tensor, requires_grad=False)
        method: Any = module.quant_method
        method.process_weights_after_loading(module)
        for key, parameter in kept.items():
            parameter.data.copy_(own[key])
    finally:
        own.update(kept)


class PlannedUpdate:
    """Loads the chunks of one update by a copy plan, without vLLM's loader.

    Args:
        plan: where each element goes.
        model: the serving model.
        device: the device of its weights.

    Raises:
        NoPlanError: the model's parameters don't match the plan.
    """

    def __init__(self, plan: CopyPlan, model: torch.nn.Module, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._places = find_parameters(plan, model, device)
        self._repacked: dict[str, RepackedLayer] = {}
        for module, names in repacked_by_module(self._places, device).items():
            layer = RepackedLayer(module, {key: plan.targets[name] for key, name in names.items()})
            self._repacked |= dict.fromkeys(names.values(), layer)
        self._begun: set[str] = set()

    def load(self, tensors: Received) -> None:
        """Copies a chunk's tensors into the model's parameters.

        Raises:
            KeyError: the manifest has no tensor of that name.
        """
        batch, filled = copies(self._plan, tensors, self._memory)
        padded = self._pad(name for name, _ in filled)
        batch.run()
        for name, numel in (*padded, *filled):
            if name in self._repacked:
                self._repacked[name].note(numel)

    def _pad(self, names: Iterable[str]) -> list[tuple[str, int]]:
        new = [name for name in dict.fromkeys(names) if name not in self._begun]
        self._begun.update(new)
        fills = self._plan.fills
        return [(name, pad(fills.get(name, ()), self._memory(name))) for name in new]

    def _memory(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if name in self._repacked:
            return self._repacked[name].memory(place.key, self._device)
        with as_tensors():
            return place.tensor.data


class PlanComparison:
    """Compares the copies that vLLM's loader makes in one update with a copy plan.

    Each element that the plan would have copied must be where the plan would have put it. A chunk's
    tensors are kept until their layers are complete, because vLLM's reload fills a layer only then.
    A layer that vLLM repacks is compared before it is repacked.

    Args:
        plan: the copy plan.
        model: the serving model.
        device: the device of its weights.

    Attributes:
        difference: the first difference; empty if there is none.

    Raises:
        NoPlanError: the model's parameters don't match the plan.
    """

    def __init__(self, plan: CopyPlan, model: torch.nn.Module, device: torch.device) -> None:
        self._plan = plan
        self._places = find_parameters(plan, model, device)
        self._missing = {name for name, copies in plan.copies.items() if copies}
        self._waiting: dict[str, list[tuple[str, torch.Tensor]]] = {}  # received, by parameter
        self._hooked: list[tuple[Any, Any]] = []
        self._names_of = repacked_by_module(self._places, device)
        self.difference = ""
        self._repacked = {name for names in self._names_of.values() for name in names.values()}
        methods = {id(module.quant_method): module.quant_method for module in self._names_of}
        for method in methods.values():
            self._hook(method)

    def on_load(self, tensors: Received) -> None:
        """Keeps a chunk that the loader is about to load, until its elements are compared."""
        for name, tensor in tensors:
            self._missing.discard(name)
            for target in dict.fromkeys(copy.target for copy in self._plan.copies[name]):
                self._waiting.setdefault(target, []).append((name, tensor))

    def compare_loaded(self) -> None:
        """Compares the parameters that the loader has filled so far."""
        for name in [name for name in self._waiting if name not in self._repacked]:
            place = self._places[name]
            if place.current is place.tensor:
                self._compare(name, place.tensor.data)

    @property
    def is_equal(self) -> bool:
        """Whether every element arrived where the plan would have copied it."""
        return not (self._missing or self._waiting or self.difference)

    def finish(self) -> None:
        """Compares the remaining parameters, after the loader has finished."""
        self.close()
        for name in list(self._waiting):
            current = None if name in self._repacked else self._places[name].current
            if current is None:
                self._differs(f"{name} was not post-processed")
                self._waiting.pop(name)
            else:
                self._compare(name, current.data)

    def close(self) -> None:
        """Removes from vLLM's layers the hooks that compare them before they are repacked."""
        for method, own in self._hooked:
            if own is None:
                del method.process_weights_after_loading
            else:
                method.process_weights_after_loading = own
        self._hooked = []

    def _hook(self, method: Any) -> None:
        original: Callable[[torch.nn.Module], None] = method.process_weights_after_loading
        self._hooked.append((method, vars(method).get("process_weights_after_loading")))

        def compared_first(layer: torch.nn.Module) -> None:
            try:
                for name in self._names_of.get(layer, {}).values():
                    self._compare_processed(name)
            except Exception as error:  # noqa: BLE001 - a comparison must not spoil the load
                self._differs(f"{type(error).__name__}: {error}")
            original(layer)

        method.process_weights_after_loading = compared_first

    def _compare_processed(self, name: str) -> None:
        place = self._places[name]
        current = place.current
        early = current is place.tensor and name not in self._waiting
        if early or (current is place.tensor and self._difference_of(name, current.data)):
            self._repacked.discard(name)  # it is loaded where it serves, whatever its layer does
        elif current is not None:
            self._compare(name, current.data)

    def _compare(self, name: str, loaded: torch.Tensor) -> None:
        self.difference = self.difference or self._difference_of(name, loaded)
        self._waiting.pop(name, None)

    def _difference_of(self, name: str, loaded: torch.Tensor) -> str:
        target = self._plan.targets[name]
        received = self._waiting.get(name, [])
        if (tuple(loaded.shape), loaded.dtype) != (target.shape, target.dtype):
            return f"{name} is {loaded.dtype} {list(loaded.shape)}"
        if not loaded.is_contiguous():
            return f"{name} is not contiguous"
        for each in self._plan.fills.get(name, ()):
            padding = part(loaded, each.region)
            if not bool((padding == each.value).all()):
                return f"the padding of {name} differs"
        for tensor, values in received:
            whole = values.contiguous()
            for copy in self._plan.copies[tensor]:
                if copy.target != name:
                    continue
                if not equal_bits(part(loaded, copy.region), part(whole, copy.source)):
                    return f"{name} differs from the received {tensor}"
        return ""

    def _differs(self, difference: str) -> None:
        self.difference = self.difference or difference


def copies(
    plan: CopyPlan, tensors: Received, memory: Callable[[str], torch.Tensor]
) -> tuple[CopyBatch, list[tuple[str, int]]]:
    """Prepares the copies of received tensors into parameters and buffers, by a plan.

    Args:
        plan: where each element goes.
        tensors: ``(name, tensor)`` pairs: some tensors of the manifest.
        memory: returns the tensor to fill, by the name of a parameter or buffer.

    Returns:
        The copies, not yet executed; and for each copy the name of the parameter or buffer, with
            how many elements the copy fills.

    Raises:
        KeyError: the manifest has no tensor of that name.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    filled: list[tuple[str, int]] = []
    for name, tensor in tensors:
        whole = tensor.contiguous()
        for copy in plan.copies[name]:
            source = part(whole, copy.source)
            targets.append(part(memory(copy.target), copy.region))
            sources.append(source)
            filled.append((copy.target, source.numel()))
    return CopyBatch(targets, sources), filled


def pad(fills: Iterable[TracedFill], target: torch.Tensor) -> int:
    """Fills elements of a parameter that no tensor of the update fills, such as padding.

    Args:
        fills: the regions with such elements, and their constant values, from the copy plan.
        target: the memory of the parameter to write.

    Returns:
        How many elements were filled.
    """
    return sum(part(target, each.region).fill_(each.value).numel() for each in fills)


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have equal bits; so a NaN equals the same NaN.

    Args:
        one: a tensor.
        other: a tensor of the same shape; cast to the dtype of ``one`` before the comparison.
    """
    other = other.to(device=one.device, dtype=one.dtype)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
