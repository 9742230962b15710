"""vLLM's own ``sparse_nccl``, both ends, on a CPU: over gloo, and otherwise as it is.

What vLLM sends, checks, receives and loads, is vLLM's. Two things are not: the communicator, and
that vLLM waits for a GPU when a chunk has come. :mod:`tests.support.pair_plugin` registers both
ends under vLLM's own name.

A value of :data:`BREAKS` plus its own rank makes a worker fail, once it has written the patch.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.weight_transfer import sparse_nccl_engine as vllms

from tests.support.gloo_group import join, start_broadcast
from tests.support.pair import no_stream

if TYPE_CHECKING:
    from torch import Tensor

BREAKS: Final = 65_536.0
POLL_S: Final = 0.002
# What gloo can't abort, and would wait for when it is let go.
_LEFT: Final[list[object]] = []


class Gloo:
    """What vLLM's broadcasting engines use of a ``PyNcclCommunicator``."""

    device = torch.device("cpu")

    def __init__(self, address: str, port: int, rank: int, size: int) -> None:
        self.breaks = False
        self.group = SimpleNamespace(store=None, socket=None)  # which TRL's clients let go
        self._rank = rank
        self._group = join(address, port, rank, size)
        self._gone = threading.Event()

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:  # noqa: ARG002 - a GPU's
        assert src == 0
        if self._gone.is_set():
            return
        work = start_broadcast(self._group, tensor)
        while not work.is_completed():
            if self._gone.wait(POLL_S):  # as an aborted kernel of NCCL ends: nothing has come
                _LEFT.append((self._group, work, tensor))
                return
        work.wait()
        if self._rank and tensor.is_floating_point():
            self.breaks |= bool((tensor == BREAKS + self._rank).any())

    def destroy(self) -> None:
        """Ends a broadcast of another thread, as vLLM's does by aborting the communicator."""
        self._gone.set()


def of_worker(info: Any, parallel: Any) -> Gloo:
    place = parallel.data_parallel_index * parallel.world_size + parallel.rank
    return Gloo(info.master_address, info.master_port, place + info.rank_offset, info.world_size)


def of_trainer(info: Any) -> Gloo:
    return Gloo(info.master_address, info.master_port, 0, info.world_size)


vllms.worker_init_process_group = of_worker
vllms.open_trainer_endpoint = of_trainer
torch.cuda.current_stream = no_stream  # type: ignore[assignment]


class SparseWorkerEngine(vllms.SparseNCCLWeightTransferEngine):  # type: ignore[misc]
    """In each of vLLM's workers."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.model_update_group.breaks:
            self.model_update_group.breaks = False
            raise RuntimeError("broken on purpose")


SparseTrainerEngine = vllms.SparseNCCLTrainerWeightTransferEngine
