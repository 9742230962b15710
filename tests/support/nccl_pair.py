"""vLLM's own ``nccl``, both ends, on a CPU: over gloo, and otherwise as it is.

What vLLM plans, describes, packs, sends, checks, receives and loads, is vLLM's. Three things are
not: the communicator, the streams of a GPU, and that vLLM waits for these. TRL makes its
communicator with the same function. :mod:`tests.support.pair_plugin` registers both ends under
vLLM's own name.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.distributed.weight_transfer import nccl_engine as vllms

from tests.support.pair import NoStream, no_stream
from tests.support.sparse_pair import Gloo, of_trainer, of_worker


class OnCpu:
    """In place of ``torch`` where vLLM packs tensors: what it asks of a GPU does nothing."""

    cuda = SimpleNamespace(
        stream=lambda _: contextlib.nullcontext(), Stream=NoStream, current_stream=no_stream
    )
    accelerator = SimpleNamespace(current_device_index=lambda: 0, current_stream=no_stream)
    Event = NoStream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def of_rank(address: str, port: int, rank: int, size: int, _device: object) -> Gloo:
    return Gloo(address, port, rank, size)


vllms.worker_init_process_group = of_worker
vllms.open_trainer_endpoint = of_trainer
nccl_common.stateless_init_process_group = of_rank
packed_tensor.torch = nccl_common.torch = OnCpu()
packed_tensor._get_streams = lambda _device, count: tuple(NoStream() for _ in range(count))
torch.cuda.current_stream = no_stream  # type: ignore[assignment]
torch.Tensor.record_stream = lambda _tensor, _stream: None  # type: ignore[assignment, method-assign]


class NCCLWorkerEngine(vllms.NCCLWeightTransferEngine):  # type: ignore[misc]
    """In each of vLLM's workers."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))


NCCLTrainerEngine = vllms.NCCLTrainerWeightTransferEngine
