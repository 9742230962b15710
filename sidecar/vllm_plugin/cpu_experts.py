"""Mixture of experts over data parallel ranks on vLLM's CPU build, which lacks it.

Ranks exchange tokens by all-gather before the experts and reduce-scatter after them, with
as many rows as each rank has; ``CpuCommunicator`` (0.32) has no such collectives. Here
they are, over gloo: rows padded to the longest rank's, and a sum of which each rank takes
its part. Without expert parallelism (which that build's kernels can't do) experts are
sharded like any layer, and every step is one of all ranks together.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Give the communicator what it lacks; one that has it keeps its own. On CPUs alone."""
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
    """All ranks' rows, in order; of a list, of each tensor in it."""
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
    """This rank's rows of the sum over all ranks."""
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
    """The same, into a tensor that is there."""
    return output.copy_(reduce_scatterv(self, input_, dim, sizes))
