"""What vLLM's layerwise reload forgets on CPUs, where weights are repacked for the kernels.

Both of these serve wrong tokens after an update that reports no error (seen on vLLM
0.32 by comparing greedy tokens with transformers; on GPUs nothing is repacked here):

* An output head tied to the embeddings keeps the packed copy of its first weights:
  it is never loaded itself (``cpu_linear``, ``model_executor/layers/utils.py``).
* Mixture-of-experts layers pack their weights only while their kernel is set up for
  the first time, so an update writes unpacked weights into packed memory
  (``fused_moe/unquantized_fused_moe_method.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class CpuRepacking:
    """Wraps one update session of a model on a CPU; on other devices it does nothing."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model if device.type == "cpu" else None
        self._kernels: list[tuple[Any, Any]] = []

    def before_start(self) -> None:
        """Make expert layers set their kernel up again, and with it pack again."""
        for module in self._modules():
            method: Any = getattr(module, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None:
                self._kernels.append((method, kernel))
                method.moe_kernel = None

    def after_finish(self) -> None:
        """Give layers without a load their kernel back, and pack tied heads again."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels = []
        owners: dict[int, torch.nn.Module] = {}
        for module in self._modules():
            weight = module._parameters.get("weight")  # noqa: SLF001 - the module's own, no child's
            if weight is None or owners.setdefault(id(weight), module) is module:
                continue
            method = getattr(module, "quant_method", None)
            if method is not None and hasattr(module, "cpu_linear"):
                method.process_weights_after_loading(module)

    def _modules(self) -> list[torch.nn.Module]:
        return [] if self._model is None else list(self._model.modules())
