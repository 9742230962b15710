"""What an update costs requests that a vLLM server decodes: over the bus, and without one.

A trainer and two or three servers of one model, the trainer on one GPU and the servers on another,
side by side: each has weights of its own, and one at a time has requests. Rounds of four kinds
alternate in one run:

- **native**: vLLM's own flow, over HTTP, on a server of vLLM's alone: a post that pauses, its own
  trainer engine with its own client, whose finish sets a version, a post that resumes.
- **bus_native**: the bus, with the same trainer engine and the worker engine that belongs to it.
- **bus**: the bus, with a backend of wavebus's.
- **raw**: one broadcast of as many bytes between both GPUs, by torch's collectives, with nothing
  around it. No requests run.

In a round of the first three as many requests as asked for are begun. When all of them decode, they
are left alone for a while: those gaps between tokens are the ordinary ones. Then comes one update.
The round's figure is the longest gap of any request that some part of that update is in, from its
first message to its last; and each request must end with all its tokens. The first round of each
kind is not counted. In the end all servers must answer alike, and have the same checksums
(``weights_arrived``).

On a CPU the same runs with gloo, a tiny model, and, since vLLM's own trainer engines need CUDA, one
of somebody's plugin in their place.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from sidecar.bench.streams import gaps_ms, longest_gap_ms, percentile, streaming
from sidecar.bench.transfer.window import Window, window
from sidecar.bench.vllm_fleet import FleetPlan, fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.vllm_fleet import Fleet, ServedAnswer

    Progress = Callable[[str], None]

Way: TypeAlias = Literal["native", "bus_native", "bus"]

WAYS: Final[tuple[Way, ...]] = ("native", "bus_native", "bus")
_WARM_ROUNDS: Final = 1
# A request decodes so many tokens before its steps count, and so many of these are ordinary ones.
_BEGUN_TOKENS: Final = 8
_ORDINARY_TOKENS: Final = 40


@dataclass(frozen=True, slots=True)
class VllmTransferRound:
    """One update under load; times in ms. ``transfer_ms``: until all is received and loaded."""

    gap_ms: float
    steps_ms: list[float]
    update_ms: float
    transfer_ms: float
    window: Window


async def _round(plan: FleetPlan, running: Fleet, way: Way) -> VllmTransferRound:
    """One update of a server whose requests decode."""
    [server] = running.servers[way]
    if way != "native":
        await server.ask("calls")  # what was called before is none of its
    async with streaming(running.urls[way], plan.requests, plan.tokens) as streams:
        await streams.have(_BEGUN_TOKENS)
        decoding_s = time.monotonic()
        await streams.have(_BEGUN_TOKENS + _ORDINARY_TOKENS)
        answer = await running.trainer.ask(way)
    since_s, until_s = answer["since_s"], answer["until_s"]
    calls = [tuple(call) for call in answer["calls"]]
    if way != "native":
        calls += [tuple(call) for call in (await server.ask("calls"))["calls"]]
    seen = window(calls, since_s, until_s, answer["window_ms"])
    return VllmTransferRound(
        longest_gap_ms(streams.came, since_s, until_s),
        gaps_ms(streams.came, decoding_s, since_s),
        (until_s - since_s) * 1000,
        # vLLM's own engines receive and load in one call.
        answer.get("transfer_ms", seen.phases_ms.get("update", 0.0)),
        seen,
    )


async def measure(
    plan: FleetPlan, loop: LoopChoice, say: Progress, *, logs: Path | None = None
) -> dict[str, Any]:
    """The JSON's fields: medians, and ratios of just these.

    Args:
        logs: a folder that keeps what all processes log.

    Raises:
        UsageError: it can't run here.
        BenchFailed: a process died, or a request ended without all its tokens.
    """
    plan.check()
    began_s = time.monotonic()
    engines: dict[str, str] = {
        way: "wavebus" if way == "bus" else plan.native_engine for way in WAYS
    }
    async with fleet(plan, engines, loop, say, logs) as running:
        made = running.made
        booted_s = time.monotonic() - began_s
        say(f"booted in {booted_s:.0f} s: {made['size_bytes'] / 1e9:.2f} GB")
        before = await running.serves("native")
        raw: list[float] = []
        rounds: dict[Way, list[VllmTransferRound]] = {way: [] for way in WAYS}
        for index in range(-_WARM_ROUNDS, plan.rounds):
            for way in WAYS:
                done = await _round(plan, running, way)
                say(f"{_name(index)} {way}: gap {done.gap_ms:.0f} ms")
                if index >= 0:
                    rounds[way].append(done)
            took_ms = await running.ends.raw_ms()
            if index >= 0:
                raw.append(took_ms)
        arrived = await _arrived(running, before)
    return {
        "engine": "vllm",
        **asdict(plan),
        "megabytes": round(made["size_bytes"] / 1e6, 1),
        "tensors": made["tensors"],
        "boot_s": round(booted_s, 1),
        "took_s": round(time.monotonic() - began_s, 1),
        "weights_arrived": arrived,
        **figures(rounds, raw, made["size_bytes"]),
    }


def figures(
    rounds: dict[Way, list[VllmTransferRound]], raw_ms: list[float], size_bytes: int
) -> dict[str, Any]:
    """Medians of each way, and what they are to each other."""
    ways: dict[str, dict[str, Any]] = {
        way: _medians(done, size_bytes) for way, done in rounds.items()
    }
    raw = round(size_bytes / statistics.median(raw_ms) / 1e6, 3)
    native_gap = ways["native"]["gap_ms"]
    return {
        **ways,
        "raw_ms": round(statistics.median(raw_ms), 3),
        "raw_gb_per_s": raw,
        "ratio_gap_bus_native": round(ways["bus_native"]["gap_ms"] / native_gap, 3),
        "ratio_gap_bus": round(ways["bus"]["gap_ms"] / native_gap, 3),
        "ratio_raw_native": round(ways["native"]["transfer_gb_per_s"] / raw, 3),
        "ratio_raw_bus_native": round(ways["bus_native"]["transfer_gb_per_s"] / raw, 3),
        "ratio_raw_bus": round(ways["bus"]["transfer_gb_per_s"] / raw, 3),
    }


def table(figures: dict[str, Any]) -> str:
    """The same for people."""
    shown = [figures[way] for way in WAYS]
    size = f"{figures['megabytes']:.1f} MB in {figures['tensors']} tensors"
    rows = [
        f"{figures['model']}, {size}, {figures['requests']} requests, {figures['rounds']} rounds",
        "",
        f"{'ms, median':<26}{'native':>12}{'bus, native':>14}{'bus, ' + figures['backend']:>14}",
    ]

    def row(what: str, cells: Sequence[float | None], form: str = ".1f") -> None:
        texts = ["" if cell is None else format(cell, form) for cell in cells]
        rows.append(f"{what:<26}{texts[0]:>12}{texts[1]:>14}{texts[2]:>14}".rstrip())

    row("longest token gap", [way["gap_ms"] for way in shown])
    row(
        "  by native's",
        [None, figures["ratio_gap_bus_native"], figures["ratio_gap_bus"]],
        ".2f",
    )
    row("ordinary gap, p50", [way["step_p50_ms"] for way in shown])
    row("ordinary gap, p99", [way["step_p99_ms"] for way in shown])
    row("whole update", [way["update_ms"] for way in shown])
    row("  no tensor moves", [way["control_ms"] for way in shown])
    row("    calls", [way["control_asks_ms"] for way in shown])
    row("    messages", [way["control_idle_ms"] for way in shown])
    row("  its share", [way["control_share"] for way in shown], ".1%")
    row("pause to resume", [way["window_ms"] for way in shown])
    rows.append("calls")
    for phase in dict.fromkeys(name for way in shown for name in way["phases_ms"]):
        row(f"  {phase}", [way["phases_ms"].get(phase) for way in shown])
    row("transfer and load", [way["transfer_ms"] for way in shown])
    row("  GB/s", [way["transfer_gb_per_s"] for way in shown])
    row("  by raw's", [figures[f"ratio_raw_{way}"] for way in WAYS], ".2f")
    rows.append(f"raw broadcast: {figures['raw_ms']:.1f} ms, {figures['raw_gb_per_s']:.1f} GB/s")
    return "\n".join(rows)


def _medians(rounds: Sequence[VllmTransferRound], size_bytes: int) -> dict[str, Any]:
    windows = [done.window for done in rounds]
    steps = [step for done in rounds for step in done.steps_ms]
    transfer_ms = statistics.median(done.transfer_ms for done in rounds)
    phases = list(dict.fromkeys(name for seen in windows for name in seen.phases_ms))
    shares = [done.window.control_ms / done.update_ms for done in rounds]
    return {
        "gap_ms": _median([done.gap_ms for done in rounds]),
        "gaps_ms": [round(done.gap_ms, 3) for done in rounds],
        "step_p50_ms": round(percentile(steps, 50), 3),
        "step_p99_ms": round(percentile(steps, 99), 3),
        "update_ms": _median([done.update_ms for done in rounds]),
        "window_ms": _median([seen.window_ms for seen in windows]),
        "control_ms": _median([seen.control_ms for seen in windows]),
        "control_asks_ms": _median([seen.asks_ms for seen in windows]),
        "control_idle_ms": _median([seen.idle_ms for seen in windows]),
        "control_share": round(statistics.median(shares), 4),
        "transfer_ms": round(transfer_ms, 3),
        "transfer_gb_per_s": round(size_bytes / transfer_ms / 1e6, 3),
        "phases_ms": {
            name: _median([seen.phases_ms.get(name, 0.0) for seen in windows]) for name in phases
        },
    }


def _median(times_ms: Sequence[float]) -> float:
    return round(statistics.median(times_ms), 3)


def _name(index: int) -> str:
    return "warming up," if index < 0 else f"round {index + 1},"


async def _arrived(running: Fleet, before: Sequence[ServedAnswer]) -> bool:
    """Whether all servers serve the same by now, and another thing than before."""
    after = [await running.serves(way) for way in WAYS]
    changed = all(new.tokens != old.tokens for new, old in zip(after[0], before, strict=True))
    return all(each == after[0] for each in after) and changed
