"""One end of the raw broadcast that transfers are measured against.

``python -m sidecar.bench.transfer.broadcast RANK COUNT PORT DEVICE SIZE_BYTES LOOP``, until stdin
ends: one of COUNT processes, with torch's own collectives and nothing else. DEVICE is ``cuda``
(NCCL; each on the GPU of its rank) or ``cpu`` (gloo). Says when all have met, and answers each line
with how long one broadcast of SIZE_BYTES took it; or, ``copy``, one copy of as many bytes within
its own memory, of which it takes as much again then.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer

if TYPE_CHECKING:
    from bus.runtime.event_loop import LoopChoice


def broadcast_ms(memory: torch.Tensor) -> float:
    """From rank 0's memory into the other's, from when both are there."""
    dist.all_reduce(torch.zeros(1, device=memory.device))
    _synchronize(memory)
    since_s = time.monotonic()
    dist.broadcast(memory, 0)
    _synchronize(memory)
    return (time.monotonic() - since_s) * 1000


def copy_ms(memory: torch.Tensor, target: torch.Tensor) -> float:
    """From one place on the device to another."""
    _synchronize(memory)
    since_s = time.monotonic()
    target.copy_(memory)
    _synchronize(memory)
    return (time.monotonic() - since_s) * 1000


def _synchronize(memory: torch.Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize()


async def serve(rank: int, count: int, port: int, device: str, size_bytes: int) -> None:
    """Meet the other end, and do what is asked."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=count,
    )
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    broadcast_ms(memory)
    write_answer(ready=True)
    target: torch.Tensor | None = None
    async for command in read_commands():
        if command != "copy":
            write_answer(broadcast_ms=broadcast_ms(memory))
            continue
        if target is None:
            target = torch.empty_like(memory)
            copy_ms(memory, target)  # touched, or the first copy would pay for that
        write_answer(copy_ms=copy_ms(memory, target))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, ends, where, kind_of_device, size, kind = sys.argv[1:]
    serving = serve(int(place), int(ends), int(where), kind_of_device, int(size))
    event_loop.run(serving, loop=cast("LoopChoice", kind))
