"""Fixes for vLLM on CPUs: repacking after a reload, and collectives for mixtures of experts.

vLLM repacks weights for its CPU kernels. In two cases its layerwise reload then serves wrong tokens
after an update that reports no error (seen on vLLM 0.32 by comparing greedy tokens with
transformers; on GPUs nothing is repacked):

* An output head tied to the embeddings keeps the packed copy of its first weights, because the
head itself is never loaded (``cpu_linear``, ``model_executor/layers/utils.py``).
* Mixture-of-experts layers pack their weights only when their kernel is set up for the first time.
An update therefore writes unpacked weights into packed memory
(``fused_moe/unquantized_fused_moe_method.py``).

Data parallel ranks with experts exchange tokens by all-gather before the experts and by
reduce-scatter after them, with a different number of rows per rank. ``CpuCommunicator`` (0.32)
lacks these collectives, so this module adds them over gloo: rows are padded to the longest rank's,
and each rank takes its part of the sum. Without expert parallelism (which that build's kernels
don't support) experts are sharded like any layer, and all ranks run every step together.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bus._vllm.seams import Has, Seam
from sidecar._vllm.plugin.vllm_names import PLUGIN

if TYPE_CHECKING:
    import torch

COMMUNICATOR: Final = Seam(
    "CPU communicator",
    ("cpu_experts",),
    (Has("vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator", "all_gather"),),
    process="any",
    install=f"{PLUGIN}.loading.cpu:install",
)


class CpuRepacking:
    """Makes vLLM put every update's weights into the layout that its CPU kernels read.

    vLLM does so by itself at the first load, but not in all layers at later ones. The caller calls
    :meth:`before_start` and :meth:`after_finish` around each update. On other devices they do
    nothing.

    Args:
        model: the serving model.
        device: the device of its weights.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model if device.type == "cpu" else None
        self._kernels: list[tuple[Any, Any]] = []

    def before_start(self) -> None:
        """Removes expert layers' kernels before a load, so that vLLM packs the new weights.

        vLLM packs the weights of such a layer only when it sets up the layer's kernel.
        """
        for module in self._modules():
            method: Any = getattr(module, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None:
                self._kernels.append((method, kernel))
                method.moe_kernel = None

    def after_finish(self) -> None:
        """Repacks tied output heads after a load, and restores kernels that are still missing.

        A kernel is still missing if the update did not load its layer.
        """
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


def install() -> None:
    """Adds to vLLM's CPU communicator the collectives that mixtures of experts need.

    Does nothing on other platforms than CPUs.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - vLLM has chosen it by now

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import cpu_communicator  # noqa: PLC0415

    communicator = cpu_communicator.CpuCommunicator
    if "all_gatherv" not in vars(communicator):
        communicator.all_gatherv = all_gatherv
        communicator.reduce_scatterv = reduce_scatterv
        communicator.reduce_scatterv_into_output = reduce_scatterv_into_output


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Returns the rows of all ranks, in rank order. A collective.

    Becomes a method of vLLM's ``CpuCommunicator``.

    Args:
        self: the communicator.
        input_: this rank's rows; or a list of tensors, which gives a list of results.
        dim: the dimension of the rows; must be 0.
        sizes: how many rows each rank has; None: all have as many as this one.
    """
    import torch  # noqa: PLC0415 - in vLLM's processes
    import torch.distributed as dist  # noqa: PLC0415

    if isinstance(input_, list):
        return [all_gatherv(self, one, dim, sizes) for one in input_]
    assert dim == 0
    rows = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=self.cpu_group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """Adds the tensors of all ranks, and returns this rank's rows of the sum. A collective.

    Becomes a method of vLLM's ``CpuCommunicator``.

    Args:
        self: the communicator.
        input_: the rows for all ranks, in rank order.
        dim: the dimension of the rows; must be 0.
        sizes: how many rows each rank gets; None: all get equally many.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    assert dim == 0
    rows = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=self.cpu_group)
    begin = sum(rows[: self.rank_in_group])
    return total[begin : begin + rows[self.rank_in_group]].contiguous()


def reduce_scatterv_into_output(
    self: Any, input_: Any, output: Any, dim: int = -1, sizes: list[int] | None = None
) -> Any:
    """Calls :func:`reduce_scatterv`, and writes the result into ``output``."""
    return output.copy_(reduce_scatterv(self, input_, dim, sizes))
