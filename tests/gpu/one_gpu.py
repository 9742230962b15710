"""Engines of several workers, and NCCL, on one GPU: for hosts that have no more.

NCCL connects no two ranks that share a GPU of one host. So here each process says that it is a host
of its own (``NCCL_HOSTID``), and NCCL goes by TCP; and all workers of a vLLM server are on the GPU
that it sees. Everything but the speed is as on several GPUs: the weights, who meets whom, each
rank's share.

``python -m tests.gpu.register FOLDER one-gpu`` makes :func:`register` a plugin of vLLM's, and
``python -m tests.gpu.transfer --one-gpu`` uses it.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Final

# For vLLM's servers: what would look for other GPUs, or for memory that GPUs share.
SERVER: Final = ("--distributed-executor-backend=mp", "--disable-custom-all-reduce")
ENVIRONMENT: Final = {"NCCL_SOCKET_IFNAME": "lo", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
_HOST: Final = "NCCL_HOSTID"
_PATCHED: Final = "wavebus_one_gpu"


def apart() -> None:
    """As NCCL sees it, this process is on a host of its own."""
    os.environ[_HOST] = f"process-{os.getpid()}"
    os.environ.update(ENVIRONMENT)


def register() -> None:
    """In each process of vLLM's, or in one that it is forked from."""
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415 - vLLM has begun to load

    init_device = Worker.init_device
    if getattr(init_device, _PATCHED, False):
        return

    @functools.wraps(init_device)
    def on_the_one_gpu(worker: Any) -> None:
        apart()
        config = worker.parallel_config
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        # vLLM may count workers within a server, or within the whole group.
        config.assigned_physical_gpu_ids = [int(visible)] * config.world_size_across_dp
        init_device(worker)

    setattr(on_the_one_gpu, _PATCHED, True)
    Worker.init_device = on_the_one_gpu
