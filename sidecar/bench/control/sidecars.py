"""The engines' side of the bus: N real sidecars in one process, their engines stubbed out.

``python -m sidecar.bench.control.sidecars ADDRESS GROUP ENGINES LOOP``; until stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, cast

import bus.log
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from sidecar.engine import Chunk, EngineInfo, Staging, StagingCapacity, Target
from sidecar.sidecar import Sidecar

if TYPE_CHECKING:
    from bus.manifest import Manifest
    from bus.messages import PauseMode, ProbeResult, SleepLevel, Verify
    from bus.runtime.event_loop import LoopChoice
    from bus.weight_transfer.allocation import RankAssignment
    from sidecar.shared_pages.core_status import CoreStatusView
    from sidecar.shared_pages.pause_lease import AbandonedPause, LeaseOutcome, PauseLease


class StubEngine:
    """Implements :class:`sidecar.engine.Engine`; every call returns at once."""

    async def start(self) -> EngineInfo:
        return EngineInfo("stub", "wavebus bench", "none", 0, 1, 1, ("shm",), "")

    async def close(self) -> None:
        pass

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def in_flight(self) -> int:
        return 0

    async def request_ids(self) -> tuple[str, ...]:
        return ()

    def core_view(self) -> CoreStatusView | None:
        return None

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:  # noqa: ARG002 - it ends with its sidecar
        return None

    def abandoned_pause(self) -> AbandonedPause | None:
        return None

    async def version(self) -> int:
        return 0

    async def join_run(self, run: str) -> None:
        pass

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def sleep(self, level: SleepLevel) -> None:
        pass

    async def wake_weights(self) -> None:
        pass

    async def wake(self) -> None:
        pass

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - as in the protocol
        pass

    async def abort_requests(self) -> int:
        return 0

    async def clear_cache(self) -> None:
        pass

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:  # noqa: ARG002
        return 1

    async def arm(
        self,
        manifest: Manifest,  # noqa: ARG002
        target: Target = "model",  # noqa: ARG002
        staging: Staging | None = None,  # noqa: ARG002
    ) -> StagingCapacity:
        return StagingCapacity(why_not="a stub has no weights")

    async def start_update(
        self, *, recover: bool, target: Target = "model", staged: bool = False
    ) -> None:
        pass

    async def receive(self, chunk: Chunk) -> None:
        pass

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        pass

    async def restore(self, target: Target = "model") -> None:
        pass

    async def finish_update(self) -> None:
        pass

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],  # noqa: ARG002
        max_tokens: int,  # noqa: ARG002
        salt: str,  # noqa: ARG002
        *,
        mode: PauseMode,  # noqa: ARG002
        clear_cache: bool,  # noqa: ARG002
    ) -> tuple[ProbeResult, ...]:
        return ()

    async def commit(self, version: int) -> None:
        pass

    async def swap(self, version: int, *, clear_cache: bool) -> None:
        pass

    async def call_off(self) -> None:
        pass


async def serve(broker: str, group: str, engines: int) -> None:
    """Join all of them."""
    async with contextlib.AsyncExitStack() as stack:
        sidecars = [
            Sidecar(StubEngine(), broker=broker, group=group, name=f"engine-{index}")
            for index in range(engines)
        ]
        for sidecar in sidecars:
            await stack.enter_async_context(sidecar)
        for sidecar in sidecars:
            await sidecar.joined()
        write_answer(ready=True)
        async for _ in read_commands():
            pass


if __name__ == "__main__":
    bus.log.configure(level="warning", json=True)
    address, group_name, count, kind = sys.argv[1:]
    event_loop.run(serve(address, group_name, int(count)), loop=cast("LoopChoice", kind))
