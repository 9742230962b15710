"""``bench gap`` of vLLM servers: one of vLLM's alone, and one with a sidecar, which is updated in a
pause and staged, in turn; or two DP groups. See :mod:`sidecar.bench.vllm_fleet`.

In the end all serve the same, by their tokens and their weights' checksums. But for one thing: vLLM
packs a mixture's experts for its CPU kernels when they are first loaded, and at no update after
that (0.32; see :mod:`sidecar.vllm.plugin.loading.cpu`). So on a CPU what it updates by itself has
unpacked experts in memory that is read as packed, and answers otherwise. There its experts and its
answers are compared with nothing, and the others' answers with those of the trainer's own model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sidecar.bench.gap.gap_rounds import GapRun, Measured, report
from sidecar.bench.vllm_fleet import NATIVE, FleetPlan, ServedAnswer, fleet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.gap.gap_rounds import Way
    from sidecar.bench.vllm_fleet import Fleet

    Progress = Callable[[str], None]

_BUS: Final = "bus"
# A parameter of experts, by vLLM's name for it; and what is said where those are left out.
_EXPERTS: Final = ".routed_experts."
_LEFT_OUT: Final = "native's tokens and experts, which its own update leaves unpacked on a CPU"
_SERVERS: Final[dict[Way, str]] = {"native": NATIVE, "paused": _BUS, "staged": _BUS}


async def bench(
    plan: FleetPlan, loop: LoopChoice, say: Progress, *, logs: Path | None = None
) -> tuple[dict[str, Any], Measured]:
    """The JSON's fields, and the rounds that they are of.

    Args:
        logs: a folder that keeps what all processes log.

    Raises:
        UsageError: it can't run here.
        BenchFailed: a process died, or a request ended without all its tokens.
    """
    plan.check()
    engines = {NATIVE: plan.native_engine, _BUS: "wavebus"}
    async with fleet(plan, engines, loop, say, logs) as servers:
        return await report("vllm", plan, await _running(plan, servers), say)


async def _running(plan: FleetPlan, servers: Fleet) -> GapRun:
    unpacked = plan.mixture and plan.device == "cpu"
    expected = await servers.expected() if unpacked else ()

    async def serves(way: Way) -> object:
        served = await servers.serves(_SERVERS[way])
        if not unpacked:
            return served
        return [without_experts(each, expected if way == "native" else ()) for each in served]

    on_the_bus = servers.servers[_BUS]
    return GapRun(
        trainer=servers.trainer,
        urls={way: servers.urls[name] for way, name in _SERVERS.items()},
        engines={"native": (), "paused": on_the_bus, "staged": on_the_bus},
        raw_ms=servers.ends.raw_ms,
        copy_ms=servers.ends.copy_ms,
        serves=serves,
        size_bytes=servers.made["size_bytes"],
        tensors=servers.made["tensors"],
        not_compared=_LEFT_OUT if unpacked else "",
    )


def without_experts(served: ServedAnswer, expected: tuple[int, ...] = ()) -> ServedAnswer:
    """What is compared where experts are not: the other weights, and the tokens, or else those that
    are expected in their place."""
    sums = {name: sum_ for name, sum_ in served.checksums.items() if _EXPERTS not in name}
    return ServedAnswer(expected or served.tokens, sums)
