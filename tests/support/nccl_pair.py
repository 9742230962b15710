"""vLLM's own ``nccl``, both ends, on a CPU: over gloo, not packed, and otherwise as it is.

What vLLM plans, describes, sends, checks, receives and loads, is vLLM's. Two things are not: the
communicator, and that vLLM waits for a GPU when a chunk has come. Packed, it needs streams of a
GPU. :mod:`tests.support.pair_plugin` registers both ends under vLLM's own name.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_engine as vllms

from tests.support.pair import no_stream
from tests.support.sparse_pair import of_trainer, of_worker

vllms.worker_init_process_group = of_worker
vllms.open_trainer_endpoint = of_trainer
torch.cuda.current_stream = no_stream  # type: ignore[assignment]


class NCCLWorkerEngine(vllms.NCCLWeightTransferEngine):  # type: ignore[misc]
    """In each of vLLM's workers."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))


NCCLTrainerEngine = vllms.NCCLTrainerWeightTransferEngine
