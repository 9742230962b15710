"""The two ends of the raw broadcast that transfers are measured against; or, where trainer and
engine share a GPU, one process that copies within it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from sidecar.bench.processes import worker
from sidecar.supervision.launch import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.processes import Worker

Device: TypeAlias = Literal["cuda", "cpu"]

_ENDS: Final = 2


@dataclass(frozen=True, slots=True)
class BroadcastEnds:
    """Processes, which have met, each on the GPU of its number."""

    workers: tuple[Worker, ...]

    async def raw_ms(self) -> float:
        """One broadcast, until both are done; alone, a copy."""
        if len(self.workers) == 1:
            return await self.copy_ms()
        answers = await asyncio.gather(*(end.ask("go") for end in self.workers))
        return max(float(end["broadcast_ms"]) for end in answers)

    async def copy_ms(self) -> float:
        """One copy of as many bytes within the last one's memory."""
        return float((await self.workers[-1].ask("copy"))["copy_ms"])


@contextlib.asynccontextmanager
async def ends(
    device: Device,
    size_bytes: int,
    loop: LoopChoice,
    logs: Path | None = None,
    *,
    alone: bool = False,
    **how: Any,
) -> AsyncIterator[BroadcastEnds]:
    """Both, for the length of a block.

    Args:
        logs: a folder that keeps what they log.
        alone: there is one, since what is measured stays on one GPU.
        how: as :func:`sidecar.bench.processes.worker` has it.
    """
    port, count = free_port(), 1 if alone else _ENDS
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                worker(
                    "sidecar.bench.transfer.broadcast",
                    *(rank, count, port, device, size_bytes, loop),
                    log_path=None if logs is None else logs / f"raw-{rank}.log",
                    **how,
                )
            )
            for rank in range(count)
        ]
        await asyncio.gather(*(each.answer() for each in workers))
        yield BroadcastEnds(tuple(workers))
