"""vLLM's own ``ipc``, both ends, on a CPU: through files, not packed, and otherwise as it is.

What vLLM plans, gathers, tells, checks and loads, is vLLM's. Not vLLM's are the handles, which have
PyTorch's form and name a file of shared memory; the GPU that both ends are on; and that vLLM waits
for it. Packed, it needs a buffer on a GPU. :mod:`tests.support.pair_plugin` registers both ends
under vLLM's own name.
"""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.weight_transfer import ipc_engine as vllms

GPU = "GPU-of-the-tests"


def lend(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
    """As PyTorch's ``reduce_tensor``: what another process rebuilds the tensor from."""
    descriptor, path = tempfile.mkstemp(prefix="wavebus-tests-", dir="/dev/shm")
    with os.fdopen(descriptor, "wb") as file:
        file.write(tensor.view(torch.uint8).numpy().tobytes())
    # vLLM keeps the tensor for as long as others may read it.
    weakref.finalize(tensor, Path(path).unlink)
    return None, (
        torch.Tensor,
        tensor.size(),
        tensor.stride(),
        0,
        torch.storage.TypedStorage,
        tensor.dtype,
        0,
        path.encode(),
        tensor.nbytes,
        0,
        False,
        b"",
        0,
        b"",
        False,
    )


def rebuild(*told: Any) -> torch.Tensor:
    """As PyTorch's ``rebuild_cuda_tensor``."""
    _, size, stride, offset, _, dtype, _, path, nbytes, *_ = told
    memory = torch.from_file(path.decode(), size=nbytes, dtype=torch.uint8)
    return torch.as_strided(memory.view(dtype), size, stride, offset)


def _the_gpu(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(uuid=GPU)


def _nothing(*_: object) -> None:
    """There is no GPU to wait for."""


vllms.reduce_tensor = lend
vllms.rebuild_cuda_tensor = rebuild
torch.cuda.get_device_properties = _the_gpu  # type: ignore[assignment]
torch.cuda.ipc_collect = _nothing
torch.accelerator.current_device_index = functools.partial(int, 0)


class IPCWorkerEngine(vllms.IPCWeightTransferEngine):  # type: ignore[misc]
    """In each of vLLM's workers."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))


IPCTrainerEngine = vllms.IPCTrainerWeightTransferEngine
