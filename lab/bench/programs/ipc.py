"""Replaces vLLM's IPC trainer engine in a process that has the weights on several GPUs.

A worker can open memory of its own GPU only. So vLLM's trainer has one rank per GPU: the ranks
gather each other's memory handles, and the first rank sends all of them to the workers. Here one
process has a copy of the weights on each GPU, and makes all handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.multiprocessing.reductions import reduce_tensor
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Handles: TypeAlias = "dict[str, tuple[Any, ...]]"  # by the GPU's UUID


class CopiesTrainer(IPCTrainerWeightTransferEngine):  # type: ignore[misc]
    """A trainer engine of vLLM (IPC) that acts as one trainer rank per GPU.

    Args:
        options: as for vLLM's class.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._copies: list[tuple[torch.device, str, dict[str, torch.Tensor]]] = []
        self._others: list[tuple[torch.device, Iterator[Handles]]] = []

    def copy_to(self, gpus: Sequence[str]) -> None:
        """Copies the weights to each of these GPUs but the trainer engine's own.

        Args:
            gpus: the GPUs, such as ``cuda:1``.
        """
        for device in map(torch.device, gpus):
            if device.index == self.device_index:
                continue
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            weights = {name: copied(tensor, device) for name, tensor in self.source}
            self._copies.append((device, uuid, weights))

    def prepare(self) -> None:
        """Makes the memory handles of the copies, before the time of an update begins.

        In vLLM's trainer other ranks make these handles at the same time, so their making must not
        count. If tensors are packed, all go through one buffer, so nothing can be made in advance.
        """
        self._others = []
        for device, uuid, weights in self._copies:
            with torch.cuda.device(device):
                handles = self._packed if self.packed else _lent
                self._others.append((device, iter(handles(uuid, weights))))

    def _packed(self, uuid: str, weights: Mapping[str, torch.Tensor]) -> Iterator[Handles]:
        for chunk in packed_ipc_producer(
            iter(weights.items()), uuid, lambda item: item[1], self.packed_buffer_size_bytes
        ):
            yield chunk.ipc_handle

    def _all_gather_and_merge_handles(self, handles: list[Handles]) -> list[Handles]:
        """Returns the handles of each tensor or chunk, including those of its copies."""
        merged = [dict(each) for each in handles]
        for device, others in self._others:
            with torch.cuda.device(device):
                for each in merged:
                    each.update(next(others))
        return merged


def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of a tensor on another GPU."""
    return tensor.to(device)


def _lent(uuid: str, weights: Mapping[str, torch.Tensor]) -> list[Handles]:
    """Returns each tensor's handle."""
    reduce: Any = reduce_tensor  # torch doesn't say what it takes
    return [{uuid: reduce(tensor)[1]} for tensor in weights.values()]
