"""Which kernels want a layer's weights in another order than they are loaded in.

Shape and type stay the same, so nothing shows. Of vLLM's unquantised layers those of experts do so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_EXPERTS_AS_LOADED: Final = frozenset({"TRITON", "BATCHED_TRITON"})


def reordering_kernel(module: torch.nn.Module) -> str:
    """The kernel for which vLLM puts this layer's weights in another order; empty: for none."""
    kernel = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    return "" if kernel is None or kernel.name in _EXPERTS_AS_LOADED else str(kernel.name)
