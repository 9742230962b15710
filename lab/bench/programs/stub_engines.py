"""The program of many real sidecars in one process, with stubs as their engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import bus.log
from bus._weight_transfer.allocation import StagingCapacity
from bus.operations import Done
from sidecar._sidecar import Sidecar
from sidecar.engine import EngineInfo

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from bus.operations import UpdateOperation


class StubEngine:
    """An engine that does nothing, for benches of the control plane.

    It implements :class:`sidecar.engine.Engine`; every call but :meth:`died` returns at once.
    """

    async def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    async def _zero(self) -> int:
        return 0

    async def _no_items(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        return ()

    def _none(self, *_: Any) -> Any:
        return None

    close = join_run = pause = resume = sleep = wake_weights = wake = admit = _nothing
    clear_cache = commit = call_off = _nothing
    in_flight = version = abort_requests = _zero
    request_ids = probe = _no_items
    core_view = write_pause_lease = abandoned_pause = _none

    async def start(self) -> EngineInfo:
        """Returns the properties of a stub."""
        return EngineInfo("stub", "wavebus bench", "none", 0, 1, 1, ("shm",), "")

    async def died(self) -> str:
        """Waits forever, because a stub does not die."""
        await asyncio.Event().wait()
        return ""

    async def perform(self, _operation: UpdateOperation) -> Done:
        """Returns why an update can't be staged: a stub has no weights."""
        return Done(room=StagingCapacity(why_not="a stub has no weights"))


async def stub_engines(
    stack: AsyncExitStack, broker: str, group: str, engines: int, first: int = 0
) -> None:
    """Makes many stub engines join a group, each with a sidecar, numbered from ``first``."""
    bus.log.configure(level="warning", json=True)
    sidecars = [
        Sidecar(StubEngine(), broker=broker, group=group, name=f"engine-{index}")
        for index in range(first, first + engines)
    ]
    for sidecar in sidecars:
        await stack.enter_async_context(sidecar)
    for sidecar in sidecars:
        await sidecar.joined()
