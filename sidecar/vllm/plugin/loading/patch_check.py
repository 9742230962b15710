"""Checks that a patch can be written into these parameters where they serve.

vLLM hands a patch to the model's loaders as tensors of full shape, with NaN for what stays, and
loaders write into the parameters that serve. That is right only as long as those lie as they were
when they were loaded; vLLM itself compares shapes, and nothing else. It may have laid them out anew
since, for its kernels: quantised, transposed, packed, or blocks of one shape in another order. The
first three show; of the last, expert layers are known to do so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sidecar.vllm.plugin.loading.loader_trace import refused
from sidecar.vllm.plugin.loading.parameter_map import reordering_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def check_in_place(
    vllm_config: Any,
    serving: torch.nn.Module,
    loaded: Mapping[str, torch.nn.Parameter],
    origins: Mapping[str, str],
) -> None:
    """Refuse a patch of parameters that don't lie as they were loaded.

    Args:
        vllm_config: vLLM's.
        serving: the worker's model.
        loaded: the parameters of the same model before any was processed.
        origins: names of those that are patched, each with that of a tensor of the patch.

    Raises:
        EngineError: code ``manifest_refused``, with the tensor and what became of its parameter.
    """
    parameters = dict(serving.named_parameters())
    for name, tensor in origins.items():
        if vllm_config.quant_config is not None:
            raise refused(tensor, f"the model is quantised, and so is {name}: {_WHOLE}")
        now = parameters.get(name)
        if now is None or _layout(now) != _layout(loaded[name]):
            found = "gone" if now is None else f"{list(now.shape)} of {now.dtype} by now"
            raise refused(
                tensor, f"vLLM has laid {name} out anew for its kernels ({found}): {_WHOLE}"
            )
        owner = serving.get_submodule(name.rpartition(".")[0])
        if getattr(getattr(owner, "cpu_linear", None), "__closure__", None):
            raise refused(tensor, f"vLLM keeps {name} packed for the CPU: {_WHOLE}")
        kernel = reordering_kernel(owner)
        if kernel:
            raise refused(
                tensor,
                f"vLLM has laid {name} out anew for its {kernel} kernel: {_WHOLE}, or boot "
                "vLLM with --moe-backend triton",
            )


_WHOLE: Final = "it takes whole sets of weights, and no patches"


def _layout(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    return tuple(parameter.shape), parameter.stride(), parameter.dtype
