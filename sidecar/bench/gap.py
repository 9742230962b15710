"""``bench gap``: the time between tokens over a weight update, in three ways side by side.

- **native**: the engine's own flow: pause, update, resume. No bus.
- **paused**, **staged**: the bus, ``update_weights(how=...)``.

A round is one update while requests decode (:func:`sidecar.bench.streams.under_load`); its figure
is the longest gap of any request that some part of the update is in, and each request must end
with all its tokens. In the end all engines must serve the same, and another thing than before
(``weights_arrived``).
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from sidecar.bench import gap_engines
from sidecar.bench.harness import gb_per_s, in_turn, median, medians, say, title
from sidecar.bench.streams import percentile, under_load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.bench.gap_engines import GapEngines
    from sidecar.bench.harness import Bench
    from sidecar.bench.plans import GapPlan

WAYS: Final = ("native", "paused", "staged")


@dataclass(frozen=True, slots=True)
class GapRound:
    """One update under load.

    Attributes:
        figures: ``gap_ms``; ordinary gaps before the update (``step_p50_ms``, ``step_p99_ms``);
            ``update_ms`` from its first message to its last, ``receive_ms`` from when its first
            chunk left to when its last one was there, and with a bus ``commit_ms``, from the COMMIT
            to its last ack; ``before_tokens_per_s`` of all requests together, and of what is staged
            ``receiving_tokens_per_s``, from the update's begin to its COMMIT; ``swap_ms``, how long
            the swap kept the slowest engine from steps.
        steps_ms: ordinary gaps, before it.
        lost: requests that ended with fewer tokens.
        tokens: when each came, in ms from the update's begin, and how long after the one before of
            its request.
    """

    figures: dict[str, float]
    steps_ms: Sequence[float]
    lost: int
    tokens: Sequence[tuple[float, float]]

    def describe(self) -> str:
        """In a line."""
        found = self.figures
        text = f"gap {found['gap_ms']:.0f} ms, steps of {found['step_p50_ms']:.0f} ms before"
        if "swap_ms" in found:
            text += (
                f"; {found['ratio_throughput_receiving']:.0%} of the tokens while it received; "
                f"swapped in {found['swap_ms']:.1f} ms"
            )
        return text


@dataclass(frozen=True)
class Measured:
    """All counted rounds. ``raw_ms``, ``copy_ms``: one of each per round."""

    rounds: dict[str, list[GapRound]]
    raw_ms: list[float]
    copy_ms: list[float]
    arrived: bool


async def measure(bench: Bench, plan: GapPlan) -> dict[str, Any]:
    """The JSON's fields; draws the picture, too.

    Raises:
        BenchFailed: a process died, or a request ended without all its tokens, or before the
            update did.
    """
    start = gap_engines.vllm if plan.engine == "vllm" else gap_engines.embedded
    engines = await start(bench, plan)
    megabytes = round(engines.size_bytes / 1e6, 1)
    say(f"{megabytes} MB, {plan.requests} requests at a time")
    measured = await rounds_of(engines, plan)
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
    from sidecar.bench.picture import draw  # noqa: PLC0415 - it is optional

    shown = {way: typical(done) for way, done in measured.rounds.items()}
    traces = {way: (each.figures["update_ms"], each.tokens) for way, each in shown.items()}
    draw(traces, figures, plan.picture)
    return {**figures, "picture": str(plan.picture)}


async def rounds_of(engines: GapEngines, plan: GapPlan) -> Measured:
    """Alternate."""
    before = await engines.serves("native")
    raw: list[float] = []
    copies: list[float] = []

    async def raw_round() -> None:
        raw.append(await engines.raw_ms())
        copies.append(await engines.copy_ms())

    ways: dict[str, Any] = {way: partial(one_round, engines, way, plan) for way in WAYS}
    ways["raw"] = raw_round

    def tell(number: int, way: str, done: GapRound | None) -> None:
        if done:
            say(f"{title(number)}, {way}: {done.describe()}")

    found = await in_turn(ways, plan.rounds, on_round=tell)
    after = [await engines.serves(way) for way in WAYS]
    arrived = all(each == after[0] for each in after) and after[0] != before
    # The first of each was to warm up.
    return Measured({way: found[way] for way in WAYS}, raw[1:], copies[1:], arrived)


async def one_round(engines: GapEngines, way: str, plan: GapPlan) -> GapRound:
    """One update of a way's engines while requests decode."""
    update = partial(engines.update, way)
    done = await under_load(engines.urls[way], plan.requests, plan.tokens, update)
    steps, answer, (since_s, until_s) = done.steps_ms(), done.answer, done.span
    found = {
        "gap_ms": done.longest_gap_ms(),
        "step_p50_ms": percentile(steps, 50),
        "step_p99_ms": percentile(steps, 99),
        "update_ms": done.update_ms,
        "receive_ms": answer["receive_ms"],
        "before_tokens_per_s": done.tokens_per_s(done.decoding_s, since_s),
    }
    if way != "native":
        found["commit_ms"] = answer["commit_ms"]
    if way == "staged":
        found["swap_ms"] = max([await engine.ask("swap_ms") for engine in engines.engines[way]])
        receiving = done.tokens_per_s(since_s, until_s - answer["commit_ms"] / 1000)
        found["receiving_tokens_per_s"] = receiving
        found["ratio_throughput_receiving"] = receiving / found["before_tokens_per_s"]
    tokens = [
        ((at_s - since_s) * 1000, (at_s - before_s) * 1000)
        for times in done.streams.came
        for before_s, at_s in itertools.pairwise(times)
    ]
    lost = sum(count != plan.tokens for count in done.streams.counts)
    return GapRound(found, steps, lost, tokens)


def figures_of(measured: Measured, *, requests: int, size_bytes: int) -> dict[str, Any]:
    """The JSON's fields: of each way medians and all rounds, and what they are to each other."""
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


def _of_way(rounds: Sequence[GapRound], size_bytes: int) -> dict[str, Any]:
    steps = [step for done in rounds for step in done.steps_ms]
    each: dict[str, list[float]] = defaultdict(list)
    for done in rounds:
        for name, value in done.figures.items():
            each[name].append(round(value, 3))
    found = medians([done.figures for done in rounds])
    found.pop("ratio_throughput_receiving", None)  # it stands beside the other ratios
    return {
        **found,
        # Of all rounds' steps together.
        "step_p50_ms": round(percentile(steps, 50), 3),
        "step_p99_ms": round(percentile(steps, 99), 3),
        "receive_gb_per_s": gb_per_s(size_bytes, found["receive_ms"]),
        "rounds": dict(each),
    }


def typical(rounds: Sequence[GapRound]) -> GapRound:
    """The one whose gap is the median, or next to it."""
    middle_ms = statistics.median(done.figures["gap_ms"] for done in rounds)
    return min(rounds, key=lambda done: abs(done.figures["gap_ms"] - middle_ms))
