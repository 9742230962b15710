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

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class CpuRepacking:
    """Keeps repacked layers correct during one model's updates; does nothing on other devices."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model if device.type == "cpu" else None
        self._kernels: list[tuple[Any, Any]] = []

    def before_start(self) -> None:
        """Makes expert layers set up their kernels, and so pack their weights, again."""
        for module in self._modules():
            method: Any = getattr(module, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None:
                self._kernels.append((method, kernel))
                method.moe_kernel = None

    def after_finish(self) -> None:
        """Restores kernels of layers that were not loaded, and repacks tied output heads."""
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
    """Adds the missing collectives to vLLM's CPU communicator; does nothing on other platforms."""
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
    """Returns all ranks' rows in rank order; for a list, one result per tensor."""
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
    """Returns this rank's rows of the sum over all ranks."""
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
    """Writes this rank's rows of the sum over all ranks into ``output``."""
    return output.copy_(reduce_scatterv(self, input_, dim, sizes))
