"""The two ends of the raw broadcast that transfers are measured against."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from sidecar.bench.processes import worker
from sidecar.launch import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bus.runtime.loop import LoopChoice
    from sidecar.bench.processes import Worker

Device: TypeAlias = Literal["cuda", "cpu"]

_ENDS: Final = 2


@dataclass(frozen=True, slots=True)
class Ends:
    """Two processes, which have met; on GPUs, on the first and the second one."""

    first: Worker
    second: Worker

    async def raw_ms(self) -> float:
        """One broadcast, until both are done."""
        told = await asyncio.gather(*(end.ask("go") for end in (self.first, self.second)))
        return max(float(end["broadcast_ms"]) for end in told)

    async def copy_ms(self) -> float:
        """One copy of as many bytes within the second one's memory."""
        return float((await self.second.ask("copy"))["copy_ms"])


@contextlib.asynccontextmanager
async def ends(
    device: Device, size_bytes: int, loop: LoopChoice, logs: Path | None = None, **how: Any
) -> AsyncIterator[Ends]:
    """Both, for the length of a block.

    Args:
        logs: a folder that keeps what they log.
        how: as :func:`sidecar.bench.processes.worker` has it.
    """
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                worker(
                    "sidecar.bench.broadcast",
                    *(rank, port, device, size_bytes, loop),
                    log_path=None if logs is None else logs / f"raw-{rank}.log",
                    **how,
                )
            )
            for rank in range(_ENDS)
        ]
        await asyncio.gather(first.answer(), second.answer())
        yield Ends(first, second)
