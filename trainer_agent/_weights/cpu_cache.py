"""Copies weights into CPU memory, to send the copy later or several times.

The trainer's next step may then change the originals, and sharded tensors are gathered only once.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import torch

from bus._weight_transfer.formats import aligned
from bus._weight_transfer.shm import allocate
from bus.errors import UsageError
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.source import as_described, tensor_metas

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bus._manifest import TensorMeta
    from trainer_agent._weights.source import Weights


class CpuCache:
    """Keeps a copy of weights in CPU memory, as a ``WeightSource``.

    ::

        cache = CpuCache(model)         # as large as all weights of the model
        await agent.update_weights(cache)
        ...
        cache.store(model)              # reuses the memory

    Args:
        weights: the weights to store at once; None: none yet.
        shared: whether to use shared memory, from which ``shm`` sends without a copy if
            ``packed=False``. Shared memory is not pinned for a GPU.
        keep: False on all ranks but rank 0 of a trainer with several ranks. These ranks only help
            rank 0 to gather in :meth:`store`, and have nothing to send.
    """

    def __init__(
        self, weights: Weights | None = None, *, shared: bool = False, keep: bool = True
    ) -> None:
        self._shared = shared
        self._keep = keep
        self._metas: list[TensorMeta] = []
        self._memory: list[torch.Tensor] = []
        self._guard = threading.Lock()
        self._passes = 0  # passes under way
        if weights is not None:
            self.store(weights)

    @property
    def size_bytes(self) -> int:
        """The size of the copy, in bytes."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory)

    def store(self, weights: Weights) -> None:
        """Replaces the stored weights by a copy of ``weights``.

        If the weights are sharded, this is a collective: all ranks of the trainer must call it.

        Raises:
            UsageError: an update is reading the copy; or the source contradicts its metadata, which
                leaves the cache empty.
        """
        source = as_source(weights)
        metas = tensor_metas(source.metadata())
        with self._guard:
            if self._passes:
                raise UsageError("the cache is being sent: await the update first")
            if metas != self._metas:
                rooms = _shared_buffers if self._shared else cpu_buffers
                self._memory = rooms(metas) if self._keep else []
            self._metas = []
            for place, (_, tensor) in enumerate(as_described(metas, iter(source))):
                if self._keep:
                    self._memory[place].copy_(tensor.detach())
            self._metas = metas

    def metadata(self) -> list[TensorMeta]:
        """Returns the metadata of the stored weights.

        Raises:
            UsageError: nothing is stored.
        """
        if not self._metas:
            raise UsageError("the cache is empty: store(weights) first")
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        metas = self.metadata()
        with self._guard:
            self._passes += 1
        try:
            for meta, memory in zip(metas, self._memory, strict=self._keep):
                yield meta.name, memory
        finally:
            with self._guard:
                self._passes -= 1


def cpu_buffers(metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
    """Allocates CPU memory for these tensors; pinned if this host has a GPU."""
    pinned = torch.cuda.is_available()
    return [
        torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), pin_memory=pinned)
        for meta in metas
    ]


def _shared_buffers(metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
    """Allocates all tensors in one block of shared memory."""
    starts = [0, *itertools.accumulate(aligned(meta.size_bytes) for meta in metas)]
    memory = allocate(starts[-1])
    return [
        memory[start : start + meta.size_bytes].view(getattr(torch, meta.dtype)).view(meta.shape)
        for meta, start in zip(metas, starts, strict=False)
    ]
