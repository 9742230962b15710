"""``bench gap`` of vLLM servers: one of vLLM's alone, and one with a sidecar, which is updated in a
pause and staged, in turn. See :mod:`sidecar.bench.vllm_fleet`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sidecar.bench.gap import Measured, Running, report
from sidecar.bench.vllm_fleet import NATIVE, Plan, fleet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bus.runtime.loop import LoopChoice
    from sidecar.bench.gap import Way
    from sidecar.bench.vllm_fleet import Fleet

    Progress = Callable[[str], None]

_BUS: Final = "bus"
_SERVERS: Final[dict[Way, str]] = {"native": NATIVE, "paused": _BUS, "staged": _BUS}


async def bench(
    plan: Plan, loop: LoopChoice, say: Progress, *, logs: Path | None = None
) -> tuple[dict[str, Any], Measured]:
    """The JSON's fields, and the rounds that they are of.

    Args:
        logs: a folder that keeps what all processes log.

    Raises:
        UsageError: it can't run here.
        BenchBroken: a process died, or a request ended without all its tokens.
    """
    plan.check()
    engines = {NATIVE: plan.native_engine, _BUS: "wavebus"}
    async with fleet(plan, engines, loop, say, logs) as servers:
        return await report("vllm", plan, _running(servers), say)


def _running(servers: Fleet) -> Running:
    async def serves(way: Way) -> object:
        return await servers.serves(_SERVERS[way])

    on_the_bus = (servers.servers[_BUS],)
    return Running(
        trainer=servers.trainer,
        urls={way: (servers.urls[name],) for way, name in _SERVERS.items()},
        engines={"native": (), "paused": on_the_bus, "staged": on_the_bus},
        raw_ms=servers.ends.raw_ms,
        copy_ms=servers.ends.copy_ms,
        serves=serves,
        size_bytes=servers.made["size_bytes"],
        tensors=servers.made["tensors"],
    )
