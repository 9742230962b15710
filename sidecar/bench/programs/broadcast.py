"""Times broadcasts of torch.distributed and memory copies, as baselines for weight transfers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from contextlib import AsyncExitStack


class MemoryCopy:
    """Times copies of a buffer into a second one, which was written once before."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._source = memory
        self._target = torch.zeros_like(memory).fill_(1)

    @classmethod
    def of_bytes(cls, size_bytes: int) -> Self:
        """Makes an instance that copies ``size_bytes`` bytes of CPU memory."""
        return cls(torch.ones(size_bytes, dtype=torch.uint8))

    def took_ms(self) -> float:
        """Returns the time of one copy within the device."""
        _synchronize(self._source)
        since_s = time.monotonic()
        self._target.copy_(self._source)
        _synchronize(self._source)
        return (time.monotonic() - since_s) * 1000


class BroadcastEnd:
    """One end of a broadcast: rank 0 sends, and the others receive."""

    def __init__(self, size_bytes: int, device: str) -> None:
        self._memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self._copy: MemoryCopy | None = None
        self.broadcast_ms()

    def broadcast_ms(self) -> float:
        """Returns the time of one broadcast, from when all ends are ready."""
        dist.all_reduce(torch.zeros(1, device=self._memory.device))
        _synchronize(self._memory)
        since_s = time.monotonic()
        dist.broadcast(self._memory, 0)
        _synchronize(self._memory)
        return (time.monotonic() - since_s) * 1000

    def copy_ms(self) -> float:
        """Returns the time of one copy within this end's memory; the first allocates memory."""
        if self._copy is None:
            self._copy = MemoryCopy(self._memory)
        return self._copy.took_ms()


def _synchronize(memory: torch.Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize()


async def broadcast(
    stack: AsyncExitStack, rank: int, count: int, port: int, device: str, size_bytes: int
) -> BroadcastEnd:
    """Connects this end to the others, by torch's collectives alone.

    Args:
        stack: ends the process group.
        rank: this end's rank.
        count: how many ends there are.
        port: port at which the ends meet.
        device: ``cuda`` (NCCL; each on the GPU of its rank) or ``cpu`` (gloo).
        size_bytes: size of a broadcast, in bytes.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=count,
    )
    stack.callback(dist.destroy_process_group)
    return BroadcastEnd(size_bytes, device)
