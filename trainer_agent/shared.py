"""Tensors in shared memory, from where ``shm`` sends them without a copy.

The memory has no name (``memfd``), so nothing is left of it when its last tensor, and the last
engine that has mapped it, are gone, whoever was killed. Engines find it through this process's
descriptor.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Final

import torch

from bus.errors import UsageError, WavebusError
from bus.transfer import ShmMemory, aligned


class _Memory(mmap.mmap):
    """Shared memory of this process; it goes with the last tensor that lies in it."""

    descriptor: int
    device: int
    inode: int


# By their addresses, as tensors' storages have them.
_made: Final[weakref.WeakValueDictionary[int, _Memory]] = weakref.WeakValueDictionary()


def allocate(size_bytes: int) -> torch.Tensor:
    """New shared memory as a tensor of bytes, with room for at least one.

    Raises:
        WavebusError: there is not so much left.
    """
    size_bytes = max(size_bytes, 1)
    descriptor = os.memfd_create("wavebus", os.MFD_CLOEXEC)
    try:
        # Reserve now: writing to what can't be had later is a SIGBUS.
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory = _Memory(descriptor, size_bytes)
    except OSError as error:
        os.close(descriptor)
        raise WavebusError(
            f"can't have {size_bytes} bytes of shared memory: {error.strerror}"
        ) from error
    status = os.fstat(descriptor)
    memory.descriptor, memory.device, memory.inode = descriptor, status.st_dev, status.st_ino
    weakref.finalize(memory, os.close, descriptor)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _made[tensor.data_ptr()] = memory
    return tensor


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in memory of :func:`allocate`."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _made


def place_of(tensor: torch.Tensor) -> tuple[ShmMemory, int]:
    """Where a tensor that :func:`is_shared` lies: the memory, and how far from its beginning."""
    base = tensor.untyped_storage().data_ptr()
    memory = _made[base]
    found = ShmMemory(os.getpid(), memory.descriptor, memory.device, memory.inode, len(memory))
    return found, tensor.data_ptr() - base


def share_memory(model: torch.nn.Module) -> None:
    """Move a model's parameters into shared memory, once; they stay the model's, and are trained
    where they are now.

    ::

        share_memory(model)
        agent = TrainerAgent(broker, group="policy", backend="shm", packed=False)

    Then ``shm`` need not copy them: engines read them where they are. For a moment the parameters
    take twice their memory. What is taken out of there afterwards (``model.to(...)``) is copied
    again, as is what never was there.

    Raises:
        UsageError: a parameter is not in CPU memory, or a part of one that is spread over ranks.
            Nothing has moved then.
        WavebusError: there is not so much shared memory left; same.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu" or hasattr(parameter, "full_tensor"):
            raise UsageError(
                f"model: {name} is on {parameter.device}, or spread over ranks; only whole tensors "
                "in CPU memory can be moved into shared memory"
            )
    # Storages, not parameters: those that share one go on doing so.
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
