"""Moves tensors into shared memory, from which ``shm`` sends them without a copy.

The memory has no name (``memfd``): the kernel frees it with the last tensor and the last engine
that maps it, even if a process is killed. Engines open it through this process's descriptor.
"""

from __future__ import annotations

import torch

from bus._weight_transfer.formats import aligned
from bus._weight_transfer.shm import allocate, is_shared
from bus.errors import UsageError


def share_memory(model: torch.nn.Module) -> None:
    """Moves a model's parameters into shared memory, where training updates them.

    ::

        share_memory(model)
        agent = TrainerAgent(broker, group="policy", backend="shm", packed=False)

    Engines then read the parameters in place. During the call the parameters take twice their
    memory. If parameters leave shared memory again (``model.to(...)``), ``shm`` copies them, as it
    copies any other tensor.

    Args:
        model: the model.

    Raises:
        UsageError: a parameter is not in CPU memory, or is sharded. No parameter was moved.
        WavebusError: too little shared memory is left. No parameter was moved.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu" or hasattr(parameter, "full_tensor"):
            raise UsageError(
                f"model: {name} is on {parameter.device}, or spread over ranks; only whole tensors "
                "in CPU memory can be moved into shared memory"
            )
    # Move storages, not parameters, so that parameters that share one still do.
    moved: dict[int, int] = {}
    storages = []
    size_bytes = 0
    for parameter in parameters.values():
        storage = parameter.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in moved and not is_shared(parameter):
            moved[storage.data_ptr()] = size_bytes
            storages.append(storage)
            size_bytes += aligned(storage.nbytes())
    if not storages:
        return
    memory = allocate(size_bytes)
    for storage in storages:
        old = torch.empty(0, dtype=torch.uint8).set_(storage)
        start = moved[storage.data_ptr()]
        memory[start : start + storage.nbytes()].copy_(old)
    for parameter in parameters.values():
        storage = parameter.untyped_storage()
        start = moved.get(storage.data_ptr(), -1)
        if start >= 0:
            room = memory[start : start + storage.nbytes()].view(parameter.dtype)
            offset = room.storage_offset() + parameter.storage_offset()
            parameter.data = room.as_strided(parameter.shape, parameter.stride(), offset)
