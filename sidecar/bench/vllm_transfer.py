"""``bench transfer --engine vllm``: what an update costs requests that a server decodes.

A trainer and three servers of one model (:mod:`sidecar.bench.fleet`). Rounds alternate:

- **native**: vLLM's own flow, over HTTP, on a server of vLLM's alone: a post that pauses, its own
  trainer engine with its own client, whose finish sets a version, a post that resumes.
- **bus_native**: the bus, with the same trainer engine and the worker engine that belongs to it.
- **bus**: the bus, with a backend of wavebus's.
- **raw**: one broadcast of as many bytes between both GPUs, with nothing around it; no requests.

A round of the first three is one update while requests decode
(:func:`sidecar.bench.streams.under_load`). In it **tensors move** while the trainer puts or sends a
chunk, and while the engine receives, verifies or loads one. All the rest is **control**: either
other calls are under way (``control_asks_ms``), or none is (``control_idle_ms``: messages are on
their way, or are looked at). Moments count once, whatever is done in them. ``window_ms`` is what
the engine stands still for: from the first PAUSE_LOCAL to the last engine resumed, as the broker
counts it; without a bus from the post of the pause to the answer of the resume.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sidecar.bench.fleet import NATIVE, fleet
from sidecar.bench.harness import gb_per_s, in_turn, median, medians, say, title
from sidecar.bench.streams import percentile, under_load
from sidecar.bench.transfer import covered_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.bench.fleet import Fleet, ServedAnswer
    from sidecar.bench.harness import Bench
    from sidecar.bench.plans import TransferBenchPlan

# What was called, and when it began and ended, in seconds on `time.monotonic()`'s clock.
Call: TypeAlias = "tuple[str, float, float]"

WAYS: Final = ("native", "bus_native", "bus")
# By their names in `programs.vllm_server`; `put` and `send` are the trainer's.
_MOVES: Final = frozenset({"put", "send", "receive", "verify", "load", "update"})


@dataclass(frozen=True, slots=True)
class TransferRound:
    """One update under load. ``phases_ms``: how long calls took, by name."""

    figures: dict[str, float]
    steps_ms: Sequence[float]
    phases_ms: Mapping[str, float]


async def measure(bench: Bench, plan: TransferBenchPlan) -> dict[str, Any]:
    """The JSON's fields: medians, and ratios of just these.

    Raises:
        BenchFailed: a process died, or a request ended without all its tokens.
    """
    began_s = time.monotonic()
    engines = {way: "wavebus" if way == "bus" else plan.native for way in WAYS}
    running = await fleet(bench, plan, engines)
    size_bytes, booted_s = running.made["size_bytes"], time.monotonic() - began_s
    say(f"booted in {booted_s:.0f} s: {size_bytes / 1e9:.2f} GB")
    before = await running.serves(NATIVE)
    raw_ms: list[float] = []

    async def raw_round() -> None:
        raw_ms.append(await running.ends.raw_ms())

    def tell(number: int, way: str, done: TransferRound | None) -> None:
        if done:
            say(f"{title(number)}, {way}: gap {done.figures['gap_ms']:.0f} ms")

    ways: dict[str, Any] = {way: partial(one_round, plan, running, way) for way in WAYS}
    found = await in_turn({**ways, "raw": raw_round}, plan.rounds, on_round=tell)
    rounds = {way: found[way] for way in WAYS}
    return {
        **plan.settings(),
        "megabytes": round(size_bytes / 1e6, 1),
        "tensors": running.made["tensors"],
        "boot_s": round(booted_s, 1),
        "weights_arrived": await arrived(running, before),
        "took_s": round(time.monotonic() - began_s, 1),
        **figures_of(rounds, raw_ms[1:], size_bytes),  # the first one was to warm up
    }


async def one_round(plan: TransferBenchPlan, running: Fleet, way: str) -> TransferRound:
    """One update of a server whose requests decode."""
    [server] = running.servers[way]
    if way != NATIVE:
        await server.ask("taken_calls")  # what was called before is none of its
    update = partial(running.update, way)
    done = await under_load(running.urls[way], plan.requests, plan.tokens, update)
    calls = [*done.answer["calls"], *(await server.ask("taken_calls") if way != NATIVE else ())]
    found, phases_ms = window(calls, *done.span)
    control_ms = found["control_asks_ms"] + found["control_idle_ms"]
    found |= {
        "gap_ms": done.longest_gap_ms(),
        "update_ms": done.update_ms,
        "window_ms": done.answer["window_ms"],
        "control_ms": control_ms,
        "control_share": control_ms / done.update_ms,
        # Until all is received and loaded; vLLM's own engines do so in one call.
        "transfer_ms": done.answer.get("transfer_ms", phases_ms.get("update", 0.0)),
    }
    return TransferRound(found, done.steps_ms(), phases_ms)


def window(
    calls: Sequence[Call], since_s: float, until_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """How long no tensor moved in an update, while other calls were under way and while none was;
    and how long calls took, by name.

    Args:
        calls: of whoever took part, also before and after it.
        since_s, until_s: when it began, and ended.
    """
    inside = [
        (name, max(begun_s, since_s), min(ended_s, until_s))
        for name, begun_s, ended_s in calls
        if ended_s > since_s and begun_s < until_s
    ]
    all_ms = covered_s((begun_s, ended_s) for _, begun_s, ended_s in inside) * 1000
    moving_ms = covered_s((begun, ended) for name, begun, ended in inside if name in _MOVES) * 1000
    phases_ms: dict[str, float] = defaultdict(float)
    for name, begun_s, ended_s in inside:
        phases_ms[name] += (ended_s - begun_s) * 1000
    idle_ms = (until_s - since_s) * 1000 - all_ms
    return {"control_asks_ms": all_ms - moving_ms, "control_idle_ms": idle_ms}, dict(phases_ms)


async def arrived(running: Fleet, before: Sequence[ServedAnswer]) -> bool:
    """Whether all servers serve the same by now, and another thing than before."""
    after = [await running.serves(way) for way in WAYS]
    changed = all(new.tokens != old.tokens for new, old in zip(after[0], before, strict=True))
    return all(each == after[0] for each in after) and changed


def figures_of(
    rounds: Mapping[str, Sequence[TransferRound]], raw_ms: Sequence[float], size_bytes: int
) -> dict[str, Any]:
    """Medians of each way, and what they are to each other."""
    ways = {way: _of_way(done, size_bytes) for way, done in rounds.items()}
    raw = gb_per_s(size_bytes, median(raw_ms))
    gaps_ms = {way: each["gap_ms"] for way, each in ways.items()}
    return {
        **ways,
        "raw_ms": median(raw_ms),
        "raw_gb_per_s": raw,
        **{f"ratio_gap_{way}": round(gaps_ms[way] / gaps_ms[NATIVE], 3) for way in WAYS[1:]},
        **{f"ratio_raw_{way}": round(ways[way]["transfer_gb_per_s"] / raw, 3) for way in WAYS},
    }


def _of_way(rounds: Sequence[TransferRound], size_bytes: int) -> dict[str, Any]:
    found = medians([done.figures for done in rounds])
    steps = [step for done in rounds for step in done.steps_ms]
    phases = dict.fromkeys(name for done in rounds for name in done.phases_ms)
    return {
        **found,
        "gaps_ms": [round(done.figures["gap_ms"], 3) for done in rounds],
        "step_p50_ms": round(percentile(steps, 50), 3),
        "step_p99_ms": round(percentile(steps, 99), 3),
        "transfer_gb_per_s": gb_per_s(size_bytes, found["transfer_ms"]),
        "phases_ms": {
            name: median(done.phases_ms.get(name, 0.0) for done in rounds) for name in phases
        },
    }
