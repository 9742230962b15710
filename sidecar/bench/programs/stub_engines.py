"""The program of many real sidecars in one process, with stubs as their engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import bus.log
from sidecar.engine import EngineInfo, StagingCapacity
from sidecar.sidecar import Sidecar

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from bus.manifest import Manifest
    from bus.messages import PauseMode, ProbeResult, Staging, Target
    from bus.weight_transfer.allocation import RankAssignment


class StubEngine:
    """An engine that does nothing, for benches of the control plane.

    It implements :class:`sidecar.engine.Engine`; every call returns at once.
    """

    async def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    def _none(self, *_: Any) -> Any:
        return None

    close = join_run = pause = resume = sleep = wake_weights = wake = admit = _nothing
    clear_cache = start_update = receive = load = restore = finish_update = _nothing
    commit = swap = call_off = _nothing
    core_view = write_pause_lease = abandoned_pause = _none

    async def start(self) -> EngineInfo:
        """Returns the properties of a stub."""
        return EngineInfo("stub", "wavebus bench", "none", 0, 1, 1, ("shm",), "")

    async def died(self) -> str:
        """Waits forever, because a stub does not die."""
        await asyncio.Event().wait()
        return ""

    async def in_flight(self) -> int:
        """Returns 0, because a stub has no requests."""
        return 0

    async def request_ids(self) -> tuple[str, ...]:
        """Returns no ids, because a stub has no requests."""
        return ()

    async def version(self) -> int:
        """Returns 0, because a stub has no weights."""
        return 0

    async def abort_requests(self) -> int:
        """Returns 0, because a stub has no requests to end."""
        return 0

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:  # noqa: ARG002
        """Returns 1, the number of chunks in flight."""
        return 1

    async def arm(
        self,
        manifest: Manifest,  # noqa: ARG002
        target: Target = "model",  # noqa: ARG002
        staging: Staging | None = None,  # noqa: ARG002
    ) -> StagingCapacity:
        """Returns why the update can't be staged: a stub has no weights."""
        return StagingCapacity(why_not="a stub has no weights")

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],  # noqa: ARG002
        max_tokens: int,  # noqa: ARG002
        salt: str,  # noqa: ARG002
        *,
        mode: PauseMode,  # noqa: ARG002
        clear_cache: bool,  # noqa: ARG002
    ) -> tuple[ProbeResult, ...]:
        """Returns no results, because a stub generates no tokens."""
        return ()


async def stub_engines(stack: AsyncExitStack, broker: str, group: str, engines: int) -> None:
    """Makes many stub engines join a group.

    Args:
        stack: ends the sidecars.
        broker: the broker's address.
        group: the group.
        engines: how many engines join.
    """
    bus.log.configure(level="warning", json=True)
    sidecars = [
        Sidecar(StubEngine(), broker=broker, group=group, name=f"engine-{index}")
        for index in range(engines)
    ]
    for sidecar in sidecars:
        await stack.enter_async_context(sidecar)
    for sidecar in sidecars:
        await sidecar.joined()
