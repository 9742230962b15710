"""One end of the raw broadcast that transfers are measured against, and plain copies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from contextlib import AsyncExitStack


class MemoryCopy:
    """Copies memory into as much again, which is touched before the first copy."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._source = memory
        self._target = torch.zeros_like(memory).fill_(1)

    @classmethod
    def of_bytes(cls, size_bytes: int) -> Self:
        """In the host's memory."""
        return cls(torch.ones(size_bytes, dtype=torch.uint8))

    def took_ms(self) -> float:
        """One copy, from one place on the device to another."""
        _synchronize(self._source)
        since_s = time.monotonic()
        self._target.copy_(self._source)
        _synchronize(self._source)
        return (time.monotonic() - since_s) * 1000


class BroadcastEnd:
    """Rank 0 sends as many bytes as the others receive."""

    def __init__(self, size_bytes: int, device: str) -> None:
        self._memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self._copy: MemoryCopy | None = None
        self.broadcast_ms()

    def broadcast_ms(self) -> float:
        """One broadcast, from when all ends are there."""
        dist.all_reduce(torch.zeros(1, device=self._memory.device))
        _synchronize(self._memory)
        since_s = time.monotonic()
        dist.broadcast(self._memory, 0)
        _synchronize(self._memory)
        return (time.monotonic() - since_s) * 1000

    def copy_ms(self) -> float:
        """One copy of as many bytes within this end's memory, of which it takes more then."""
        if self._copy is None:
            self._copy = MemoryCopy(self._memory)
        return self._copy.took_ms()


def _synchronize(memory: torch.Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize()


async def broadcast(
    stack: AsyncExitStack, rank: int, count: int, port: int, device: str, size_bytes: int
) -> BroadcastEnd:
    """Meet the other ends, with torch's own collectives and nothing else.

    Args:
        stack: ends it.
        rank: of this end.
        count: of all ends.
        port: where they meet.
        device: ``cuda`` (NCCL; each on the GPU of its rank) or ``cpu`` (gloo).
        size_bytes: of a broadcast.
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
