"""Checks that a patch can be written into the parameters that the model serves.

vLLM passes a patch to the model's loaders as tensors of full shape, with NaN for elements that do
not change, and the loaders write into the served parameters. That is correct only while the served
parameters have the memory layout in which they were loaded. vLLM compares nothing but shapes, and
may have changed the layout for its kernels: quantised, transposed or packed, or with blocks of one
shape in another order. The first three can be seen from shape, strides and dtype. The last can't;
only expert layers are known to be reordered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sidecar._transfer.unloaded import refused
from sidecar._vllm.plugin.loading.parameter_map import reordering_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def check_in_place(
    vllm_config: Any,
    serving: torch.nn.Module,
    loaded: Mapping[str, torch.nn.Parameter],
    origins: Mapping[str, str],
) -> None:
    """Refuses a patch if the patched parameters' layout has changed since their load.

    Args:
        vllm_config: vLLM's configuration.
        serving: the worker's model.
        loaded: the parameters of the same model on the meta device, in the layout that the loader
            expects.
        origins: the patched parameters' names, each with the name of a tensor that patches it.

    Raises:
        EngineError: code ``manifest_refused``, with the tensor and the reason.
    """
    parameters = dict(serving.named_parameters())
    for name, tensor in origins.items():
        if vllm_config.quant_config is not None:
            raise refused(tensor, f"the model, and so {name}, is quantised: {_WHOLE}")
        now = parameters.get(name)
        if now is None or _layout(now) != _layout(loaded[name]):
            found = "gone" if now is None else f"now {list(now.shape)} of {now.dtype}"
            raise refused(
                tensor, f"vLLM has changed the layout of {name} for its kernels ({found}): {_WHOLE}"
            )
        owner = serving.get_submodule(name.rpartition(".")[0])
        if getattr(getattr(owner, "cpu_linear", None), "__closure__", None):
            raise refused(tensor, f"vLLM keeps {name} packed for the CPU: {_WHOLE}")
        kernel = reordering_kernel(owner)
        if kernel:
            raise refused(
                tensor,
                f"vLLM has changed the layout of {name} for its {kernel} kernel: {_WHOLE}, or boot "
                "vLLM with --moe-backend triton",
            )


_WHOLE: Final = "send a whole set of weights instead of a patch"


def _layout(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    return tuple(parameter.shape), parameter.stride(), parameter.dtype
