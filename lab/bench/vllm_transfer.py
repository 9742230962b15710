"""``bench transfer --engine vllm``: how an update delays the requests of a server.

A trainer and three servers of one model (:mod:`lab.bench.fleet`). Rounds alternate:

- **native**: vLLM's own flow, over HTTP, on a server without wavebus: a post that pauses; an update
  by vLLM's trainer engine and client, whose last call sets a version; and a post that resumes.
- **bus_native**: the bus, with the same trainer engine and the worker engine that belongs to it.
- **bus**: the bus, with a backend of wavebus's.
- **raw**: one broadcast of as many bytes between both GPUs, with nothing around it; no requests.

With ``--gateway`` they are others, both staged:

- **agent**: the bus, as above.
- **gateway**: vLLM's own flow without pauses, through ``wavebus gateway`` to a server on the bus.

In an update **tensors move** while the trainer puts or sends a chunk, and while the engine
receives, verifies or loads one. The rest of the update's time is **control**: either other calls
are under way (``control_asks_ms``), or none is (``control_idle_ms``: messages are being sent or
handled). Each moment counts once. ``window_ms`` is the time without steps: from the first
PAUSE_LOCAL to the last engine resumed, by the broker's clock; without a bus, from the pause's post
to the resume's answer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from lab.bench import fleet, updates
from lab.bench.fleet import AGENT, BUS, GATEWAY, NATIVE
from lab.bench.gateway import compared
from lab.bench.harness import BenchFailed, gb_per_s, median, say
from lab.bench.transfer import covered_s
from lab.bench.updates import under_load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.bench.fleet import UpdatedEngines
    from lab.bench.harness import Bench
    from lab.bench.plans import EnginesPlan, TransferBenchPlan
    from lab.bench.programs.call_times import Call
    from lab.bench.updates import UpdateRound

WAYS: Final = {"native": NATIVE, "bus_native": "bus_native", "bus": BUS}
_STAGED: Final = {AGENT: BUS, GATEWAY: GATEWAY}
# Calls by their names in `programs.vllm_server`; `put` and `send` are the trainer's.
_MOVES: Final = frozenset({"put", "send", "receive", "verify", "load", "update"})


async def measure(bench: Bench, plan: TransferBenchPlan) -> dict[str, Any]:
    """Measures all ways; returns the fields of the JSON output: medians and ratios.

    Raises:
        BenchFailed: a process died, or a request ended without all its tokens.
    """
    began_s = time.monotonic()
    engines = await fleet.start_vllm(bench, plan, _STAGED if plan.gateway else WAYS)
    size_bytes, booted_s = engines.size_bytes, time.monotonic() - began_s
    say(f"booted in {booted_s:.0f} s: {size_bytes / 1e9:.2f} GB")
    measured = await updates.rounds_of(engines, plan, one_round, copy=False)
    return {
        **plan.settings(),
        "megabytes": round(size_bytes / 1e6, 1),
        "tensors": engines.tensors,
        "boot_s": round(booted_s, 1),
        "took_s": round(time.monotonic() - began_s, 1),
        "weights_arrived": measured.arrived,
        **figures_of(measured.rounds, measured.raw_ms, size_bytes),
    }


async def one_round(engines: UpdatedEngines, way: str, plan: EnginesPlan) -> UpdateRound:
    """Updates a server once while its requests decode; returns the round's figures."""
    [server] = engines.engines[way]
    if way != NATIVE:
        await server.ask("taken_calls")  # drops calls from before this round
    done, answer, _ = await under_load(engines, way, plan)
    calls = [*answer["calls"], *(await server.ask("taken_calls") if way != NATIVE else ())]
    found, phases_ms = window(calls, answer["since_s"], answer["until_s"])
    if way in _STAGED and "swap" not in phases_ms:
        raise BenchFailed(f"{way}: the update was not staged")
    done.phases_ms.update(phases_ms)
    control_ms = found["control_asks_ms"] + found["control_idle_ms"]
    done.figures.update(
        found,
        window_ms=answer["window_ms"],
        control_ms=control_ms,
        control_share=control_ms / done.figures["update_ms"],
        # Until all is received and loaded; vLLM's own engines do so in one call.
        transfer_ms=answer.get("transfer_ms", phases_ms.get("update", 0.0)),
    )
    return done


def window(
    calls: Sequence[Call], since_s: float, until_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Splits the time of an update into its calls, and the time between them.

    Args:
        calls: the calls of all processes that took part, also before and after the update.
        since_s: when the update began, on the clock of the calls.
        until_s: when it ended.

    Returns:
        ``control_asks_ms`` and ``control_idle_ms``, as in the module's docstring; and by name of a
            call, the length of all such calls together, in ms.
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


def figures_of(
    rounds: Mapping[str, Sequence[UpdateRound]], raw_ms: Sequence[float], size_bytes: int
) -> dict[str, Any]:
    """Computes the figures of the JSON output.

    Args:
        rounds: the updates of each way.
        raw_ms: how long one broadcast of the same bytes to all processes took, in each turn; with
            a single process, one copy.
        size_bytes: the size of the weights.

    Returns:
        For each way the medians of its updates. Then ``ratio_gap_…``: a way's longest token gap
            divided by that of the first way; and ``ratio_raw_…``: a way's transfer rate divided
            by the broadcast's. With a gateway, what it adds
            (:func:`lab.bench.gateway.compared`).
    """
    ways = {way: _of_way(done, size_bytes) for way, done in rounds.items()}
    raw = gb_per_s(size_bytes, median(raw_ms))
    gaps_ms = {way: each["gap_ms"] for way, each in ways.items()}
    first, *others = ways
    added = {}
    if GATEWAY in rounds:
        took_ms = ([done.figures["update_ms"] for done in rounds[way]] for way in _STAGED)
        added = compared(*took_ms)
    return {
        **ways,
        "raw_ms": median(raw_ms),
        "raw_gb_per_s": raw,
        **{f"ratio_gap_{way}": round(gaps_ms[way] / gaps_ms[first], 3) for way in others},
        **{f"ratio_raw_{way}": round(ways[way]["transfer_gb_per_s"] / raw, 3) for way in ways},
        **added,
    }


def _of_way(rounds: Sequence[UpdateRound], size_bytes: int) -> dict[str, Any]:
    phases = dict.fromkeys(name for done in rounds for name in done.phases_ms)
    return {
        **updates.of_way(rounds, size_bytes, "transfer"),
        "gaps_ms": [round(done.figures["gap_ms"], 3) for done in rounds],
        "phases_ms": {
            name: median(done.phases_ms.get(name, 0.0) for done in rounds) for name in phases
        },
    }
