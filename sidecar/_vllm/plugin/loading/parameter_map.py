"""Finds the parameters and buffers of a serving model that a copy plan fills.

Some kernels store a layer's weights in another order than the loader writes them. Shape and dtype
stay the same, so only the kernel's name shows the difference. Among vLLM's unquantised layers, only
expert layers do so.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from sidecar._vllm.plugin.loading.copy_plan import NoPlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from sidecar._vllm.plugin.loading.copy_plan import CopyPlan, PlanTarget


@dataclass(frozen=True, slots=True)
class ParameterRef:
    """A parameter or buffer of the serving model that a copy plan fills.

    Attributes:
        module: the module that owns the parameter or buffer.
        key: the name of the parameter or buffer in that module.
        tensor: the parameter or buffer, as it was found.
        address: the address of its memory, as it was found. vLLM may give a parameter new memory
            later.
    """

    module: torch.nn.Module
    key: str
    tensor: torch.Tensor
    address: int = 0

    @property
    def owned(self) -> dict[str, Any]:
        """The dict of the module's parameters or of its buffers, whichever holds the tensor."""
        own: dict[str, Any] = self.module._parameters  # noqa: SLF001 - vLLM may replace them
        return own if own.get(self.key) is not None else self.module._buffers  # noqa: SLF001

    @property
    def current(self) -> torch.Tensor | None:
        """The tensor that the module has now under this name; None if there is none."""
        return self.owned.get(self.key)


class ParameterFingerprint:
    """Detects whether vLLM has replaced or moved parameters; truthy until vLLM does.

    The engine runs no step during the check, so the compared values are prepared beforehand.

    Args:
        places: the parameters that :func:`find_parameters` found, by name.
    """

    def __init__(self, places: Mapping[str, ParameterRef]) -> None:
        found = list(places.values())
        self._own = [(place.owned, place.key) for place in found]
        self._tensors = [place.tensor for place in found]
        self._addresses = [place.address for place in found]
        with as_tensors():
            self._dtypes = [place.tensor.dtype for place in found]

    def __bool__(self) -> bool:
        now = [owned.get(key) for owned, key in self._own]
        if not all(map(operator.is_, now, self._tensors)):
            return False
        with as_tensors():
            addresses = [tensor.data_ptr() for tensor in self._tensors]
            dtypes = [tensor.dtype for tensor in self._tensors]
        return (addresses, dtypes) == (self._addresses, self._dtypes)


def find_parameters(
    plan: CopyPlan, model: torch.nn.Module, device: torch.device
) -> dict[str, ParameterRef]:
    """Returns the parameters and buffers of a model that a copy plan fills, by name.

    Raises:
        NoPlanError: the model lacks one, or has it in another shape, dtype, layout or device.
    """
    there: dict[str, ParameterRef] = {}
    for prefix, module in model.named_modules():
        own = prefix.replace(".base_layer", "")
        for key, tensor in _own_tensors(module):
            there[f"{own}.{key}" if own else key] = ParameterRef(module, key, tensor)
    places: dict[str, ParameterRef] = {}
    with as_tensors():
        for name, target in plan.targets.items():
            place = there.get(name)
            if place is None:
                raise NoPlanError(f"the serving model has no {name}")
            _check(place, name, target, device)
            places[name] = replace(place, address=place.tensor.data_ptr())
    return places


def as_tensors() -> AbstractContextManager[None]:
    """Treats vLLM's parameters as plain tensors during a block, which is faster.

    Otherwise each access goes through ``__torch_function__`` in Python, and takes 3 µs instead of
    0.1 µs.
    """
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001
    return guard


def repacks(place: ParameterRef, device: torch.device) -> bool:
    """Returns whether vLLM stores a parameter in another form after it is loaded.

    On a CPU, vLLM repacks the parameters of its layers, but not their buffers.
    """
    method = getattr(place.module, "quant_method", None)
    return device.type == "cpu" and method is not None and place.key in place.module._parameters  # noqa: SLF001 - the module's own, no child's


def repacked_by_module(
    places: Mapping[str, ParameterRef], device: torch.device
) -> dict[torch.nn.Module, dict[str, str]]:
    """Returns the parameters that vLLM repacks: by module, their names by their keys in it."""
    found: dict[torch.nn.Module, dict[str, str]] = {}
    for name, place in places.items():
        if repacks(place, device):
            found.setdefault(place.module, {})[place.key] = name
    return found


def _check(place: ParameterRef, name: str, target: PlanTarget, device: torch.device) -> None:
    tensor = place.tensor
    if tensor.is_meta or tensor.device.type != device.type:
        raise NoPlanError(f"{name} is on {tensor.device}, not on {device}")
    if repacks(place, device):
        return
    if (tuple(tensor.shape), tensor.dtype) != (target.shape, target.dtype):
        raise NoPlanError(f"the served {name} is {tensor.dtype} {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise NoPlanError(f"the served {name} is not contiguous")


def _own_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    both: list[dict[str, Any]] = [module._parameters, module._buffers]  # noqa: SLF001 - its own
    return [(k, t) for own in both for k, t in own.items() if t is not None]


_EXPERTS_AS_LOADED: Final = frozenset({"TRITON", "BATCHED_TRITON"})


def reordering_kernel(module: torch.nn.Module) -> str:
    """Returns the name of the kernel for which vLLM reorders a layer's weights; else empty."""
    kernel = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    return "" if kernel is None or kernel.name in _EXPERTS_AS_LOADED else str(kernel.name)
