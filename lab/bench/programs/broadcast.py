"""Times broadcasts and memory copies, with which weight transfers are compared."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from contextlib import AsyncExitStack


class MemoryCopy:
    """Times copies of a buffer into a second one, as a baseline for weight transfers.

    The second buffer is written once beforehand, so that page faults are not timed.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._source = memory
        self._target = torch.zeros_like(memory).fill_(1)

    @classmethod
    def of_bytes(cls, size_bytes: int) -> Self:
        """Makes an instance that copies this many bytes of CPU memory."""
        return cls(torch.ones(size_bytes, dtype=torch.uint8))

    def took_ms(self) -> float:
        """Copies the buffer once, and returns how long that took, in ms."""
        _synchronize(self._source)
        since_s = time.monotonic()
        self._target.copy_(self._source)
        _synchronize(self._source)
        return (time.monotonic() - since_s) * 1000


class BroadcastEnd:
    """One process of a broadcast: rank 0 sends, and the others receive.

    The first broadcast is made at once, so that later ones find connections open.
    """

    def __init__(self, size_bytes: int, device: str) -> None:
        self._memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self._copy: MemoryCopy | None = None
        self.broadcast_ms()

    def broadcast_ms(self) -> float:
        """Takes part in one broadcast; returns its time in ms, without the wait for others."""
        dist.all_reduce(torch.zeros(1, device=self._memory.device))
        _synchronize(self._memory)
        since_s = time.monotonic()
        dist.broadcast(self._memory, 0)
        _synchronize(self._memory)
        return (time.monotonic() - since_s) * 1000

    def copy_ms(self) -> float:
        """Copies this end's memory once within its device; returns the time in ms."""
        if self._copy is None:
            self._copy = MemoryCopy(self._memory)
        return self._copy.took_ms()


def _synchronize(memory: torch.Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize()


async def broadcast(
    stack: AsyncExitStack, rank: int, count: int, port: int, device: str, size_bytes: int
) -> BroadcastEnd:
    """Joins the processes of a broadcast by torch's collectives, without wavebus.

    On ``cuda`` these are NCCL's, each rank on the GPU of its number; on ``cpu`` they are gloo's.
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
