"""``bench gap``: the time between tokens over a weight update, in three ways.

- **native**: the engine's own flow without a bus: pause, update, resume.
- **paused**, **staged**: the bus, by ``update_weights(how=...)``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from lab.bench import fleet, updates
from lab.bench.fleet import BUS, NATIVE
from lab.bench.harness import gb_per_s, median, say
from lab.bench.streams import tokens_within
from lab.bench.updates import under_load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.bench.fleet import UpdatedEngines
    from lab.bench.harness import Bench
    from lab.bench.plans import EnginesPlan, GapPlan
    from lab.bench.updates import Measured, UpdateRound

WAYS: Final = {"native": NATIVE, "paused": BUS, "staged": BUS}


async def measure(bench: Bench, plan: GapPlan) -> dict[str, Any]:
    """Measures all ways; returns the fields of the JSON output, and draws the picture.

    Raises:
        BenchFailed: a process died, or a request ended too early: without all its tokens, or before
            its update did.
    """
    start = fleet.start_vllm if plan.engine == "vllm" else fleet.start_embedded
    engines = await start(bench, plan, WAYS)
    megabytes = round(engines.size_bytes / 1e6, 1)
    say(f"{megabytes} MB, {plan.requests} requests at a time")
    measured = await updates.rounds_of(engines, plan, one_round)
    figures = {
        **plan.settings(),
        "megabytes": megabytes,
        "tensors": engines.tensors,
        "not_compared": engines.not_compared,
        "picture": None,
        **figures_of(measured, requests=plan.requests, size_bytes=engines.size_bytes),
    }
    if find_spec("matplotlib") is None:
        say("no picture, since there is no matplotlib: pip install 'wavebus[bench]'")
        return figures
    from lab.bench.picture import draw  # noqa: PLC0415 - it is optional

    shown = {way: typical(done) for way, done in measured.rounds.items()}
    traces = {way: (each.figures["update_ms"], each.tokens) for way, each in shown.items()}
    draw(traces, figures, plan.picture)
    return {**figures, "picture": str(plan.picture)}


async def one_round(engines: UpdatedEngines, way: str, plan: EnginesPlan) -> UpdateRound:
    """Updates the engines of one way while requests decode; returns the round's figures.

    The figures include ``receive_ms``, from the first chunk's sending to the last one's arrival,
    and ``before_tokens_per_s``, of all requests together. With a bus they include ``commit_ms``,
    from COMMIT to its last ack. A staged update has ``receiving_tokens_per_s``, from the update's
    start to COMMIT, and ``swap_ms``, how long the slowest engine could not step.
    """
    done, answer, streams = await under_load(engines, way, plan)
    found, since_s = done.figures, answer["since_s"]

    def tokens_per_s(since_s: float, until_s: float) -> float:
        made = tokens_within(streams.came, streams.pieces, since_s, until_s)
        return made / (until_s - since_s)

    found["receive_ms"] = answer["receive_ms"]
    found["before_tokens_per_s"] = tokens_per_s(answer["decoding_s"], since_s)
    if way != "native":
        found["commit_ms"] = answer["commit_ms"]
    if way == "staged":
        found["swap_ms"] = max([await engine.ask("swap_ms") for engine in engines.engines[way]])
        commit_s = answer["until_s"] - answer["commit_ms"] / 1000
        found["receiving_tokens_per_s"] = tokens_per_s(since_s, commit_s)
        share = found["receiving_tokens_per_s"] / found["before_tokens_per_s"]
        found["ratio_throughput_receiving"] = share
    return done


def figures_of(measured: Measured, *, requests: int, size_bytes: int) -> dict[str, Any]:
    """Computes the JSON output's figures: each way's medians and rounds, and their ratios."""
    ways: dict[str, dict[str, Any]] = {
        way: _of_way(done, size_bytes) for way, done in measured.rounds.items()
    }
    native, paused, staged = (ways[way] for way in WAYS)
    raw_gb_per_s = gb_per_s(size_bytes, statistics.median(measured.raw_ms))
    copy_ms = median(measured.copy_ms)
    updates = [done for rounds in measured.rounds.values() for done in rounds]
    return {
        **ways,
        "raw_gb_per_s": raw_gb_per_s,
        "copy_ms": copy_ms,
        "ratio_gap_staged_native": round(staged["gap_ms"] / native["gap_ms"], 3),
        "ratio_gap_paused_native": round(paused["gap_ms"] / native["gap_ms"], 3),
        "gap_over_p99_ms": round(staged["gap_ms"] - staged["step_p99_ms"], 3),
        "receiving_throughput": staged["receiving_tokens_per_s"],
        "ratio_throughput_receiving": median(staged["rounds"]["ratio_throughput_receiving"]),
        "ratio_receive_raw": round(staged["receive_gb_per_s"] / raw_gb_per_s, 3),
        "ratio_swap_copy": round(staged["swap_ms"] / copy_ms, 3),
        "requests_all": len(updates) * requests,
        "requests_lost": sum(done.lost for done in updates),
        "weights_arrived": measured.arrived,
    }


def _of_way(rounds: Sequence[UpdateRound], size_bytes: int) -> dict[str, Any]:
    found, each = updates.of_way(rounds, size_bytes, "receive"), defaultdict(list)
    for done in rounds:
        for name, value in done.figures.items():
            each[name].append(round(value, 3))
    found.pop("ratio_throughput_receiving", None)  # it is shown beside the other ratios
    return {**found, "rounds": dict(each)}


def typical(rounds: Sequence[UpdateRound]) -> UpdateRound:
    """Returns the round whose longest gap is nearest to the median, for the picture."""
    middle_ms = statistics.median(done.figures["gap_ms"] for done in rounds)
    return min(rounds, key=lambda done: abs(done.figures["gap_ms"] - middle_ms))
