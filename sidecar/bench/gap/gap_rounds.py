"""The time between tokens over a weight update, in three ways side by side.

- **native**: the engine's own flow: pause, update, resume. No bus.
- **paused**: the bus, ``update_weights(how="paused")``.
- **staged**: the bus, ``update_weights(how="staged")``.

Rounds of them alternate in one run, so that whatever else the host does falls on all alike. In a
round as many requests as asked for are begun. When all of them decode, they are left alone for a
while: those gaps between tokens are the ordinary ones. Then comes one update. The round's figure is
the longest gap of any request that some part of that update is in; and each request must end with
all its tokens. The first round of each way is not counted. In the end all engines must serve the
same, and another thing than before (``weights_arrived``).

Here is what has that in common for all engines; :mod:`sidecar.bench.gap.embedded_gap` and
:mod:`sidecar.bench.gap.vllm_gap` start them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, TypeAlias

from sidecar.bench.streams import gaps_ms, longest_gap_ms, percentile, streaming, tokens_within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from sidecar.bench.processes import Worker
    from sidecar.bench.streams import Streams

    Progress = Callable[[str], None]

Way: TypeAlias = Literal["native", "paused", "staged"]

WAYS: Final[tuple[Way, ...]] = ("native", "paused", "staged")
WARM_ROUNDS: Final = 1
# A request decodes so many tokens before its steps count, and so many of these are ordinary ones.
BEGUN_TOKENS: Final = 8
ORDINARY_TOKENS: Final = 40


class TokenLoad(Protocol):
    """What a plan, a dataclass, has of the requests; and of each way so many rounds."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def rounds(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True)
class GapRun:
    """Trainer and engines, and how to ask them.

    Attributes:
        trainer: answers each way's name with what one update took.
        urls: of each way, where its engines take requests, rank by rank.
        engines: of each way, those who tell of their last swap.
        raw_ms: one transfer of ``size_bytes`` with nothing around it.
        copy_ms: one copy of ``size_bytes`` within an engine's memory.
        serves: what a way's engines serve now; alike where that is the same.
        not_compared: what of it is left out there, and why.
    """

    trainer: Worker
    urls: Mapping[Way, Sequence[str]]
    engines: Mapping[Way, Sequence[Worker]]
    raw_ms: Callable[[], Awaitable[float]]
    copy_ms: Callable[[], Awaitable[float]]
    serves: Callable[[Way], Awaitable[object]]
    size_bytes: int
    tensors: int
    not_compared: str = ""


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """The time around one update, in ms from its begin. ``tokens``: when each came, and how long
    after the one before of its request."""

    until_ms: float
    tokens: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class GapRound:
    """One update under load.

    Attributes:
        steps_ms: ordinary gaps, before it.
        update_ms: from its first message to its last.
        receive_ms: from when its first chunk left to when its last one was there.
        commit_ms: from the COMMIT to its last ack; 0 without a bus.
        swap_ms: how long the swap kept the slowest engine from steps; 0 of what is not staged.
        before_tokens_per_s, receiving_tokens_per_s: of all requests together; the latter from the
            update's begin to its COMMIT, and 0 without one.
        lost: requests that ended with fewer tokens.
    """

    gap_ms: float
    steps_ms: tuple[float, ...]
    update_ms: float
    receive_ms: float
    commit_ms: float
    swap_ms: float
    before_tokens_per_s: float
    receiving_tokens_per_s: float
    lost: int
    trace: TokenTrace

    def describe(self) -> str:
        """In a line."""
        text = f"gap {self.gap_ms:.0f} ms, steps of {percentile(self.steps_ms, 50):.0f} ms before"
        if self.swap_ms:
            share = self.receiving_tokens_per_s / self.before_tokens_per_s
            text += (
                f"; {share:.0%} of the tokens while it received; swapped in {self.swap_ms:.1f} ms"
            )
        return text


@dataclass(frozen=True)
class Measured:
    """All counted rounds. ``raw_ms``, ``copy_ms``: one of each per round."""

    rounds: dict[Way, list[GapRound]]
    raw_ms: list[float]
    copy_ms: list[float]
    arrived: bool


async def measure(
    running: GapRun, *, requests: int, tokens: int, rounds: int, say: Progress
) -> Measured:
    """Alternate.

    Raises:
        BenchFailed: a process died, or a request ended without all its tokens, or before the
            update did.
    """
    before = await running.serves("native")
    measured: dict[Way, list[GapRound]] = {way: [] for way in WAYS}
    raw: list[float] = []
    copies: list[float] = []
    for index in range(-WARM_ROUNDS, rounds):
        for way in WAYS:
            done = await _round(running, way, requests, tokens)
            name = "warming up," if index < 0 else f"round {index + 1},"
            say(f"{name} {way}: {done.describe()}")
            if index >= 0:
                measured[way].append(done)
        raw_ms, copy_ms = await running.raw_ms(), await running.copy_ms()
        if index >= 0:
            raw.append(raw_ms)
            copies.append(copy_ms)
    after = [await running.serves(way) for way in WAYS]
    arrived = all(each == after[0] for each in after) and after[0] != before
    return Measured(measured, raw, copies, arrived)


async def report(
    engine: str, plan: TokenLoad, running: GapRun, say: Progress
) -> tuple[dict[str, Any], Measured]:
    """Measure; the JSON's fields, and the rounds that they are of."""
    megabytes = round(running.size_bytes / 1e6, 1)
    say(f"{megabytes} MB, {plan.requests} requests at a time")
    measured = await measure(
        running, requests=plan.requests, tokens=plan.tokens, rounds=plan.rounds, say=say
    )
    return {
        "engine": engine,
        **asdict(plan),
        "megabytes": megabytes,
        "tensors": running.tensors,
        "not_compared": running.not_compared,
        **figures(measured, requests=plan.requests, size_bytes=running.size_bytes),
    }, measured


async def _round(running: GapRun, way: Way, requests: int, tokens: int) -> GapRound:
    async with streaming(running.urls[way], requests, tokens) as streams:
        await streams.have(BEGUN_TOKENS)
        decoding_s = time.monotonic()
        await streams.have(BEGUN_TOKENS + ORDINARY_TOKENS)
        answer = await running.trainer.ask(way)
    swap_ms = 0.0
    if way == "staged":
        swap_ms = max([(await engine.ask("swap"))["swap_ms"] for engine in running.engines[way]])
    since_s, until_s, commit_ms = answer["since_s"], answer["until_s"], answer["commit_ms"]
    came, pieces = streams.came, streams.pieces
    receiving = 0.0
    if commit_ms:
        commit_s = until_s - commit_ms / 1000
        receiving = tokens_within(came, pieces, since_s, commit_s) / (commit_s - since_s)
    return GapRound(
        gap_ms=longest_gap_ms(came, since_s, until_s),
        steps_ms=tuple(gaps_ms(came, decoding_s, since_s)),
        update_ms=(until_s - since_s) * 1000,
        receive_ms=answer["receive_ms"],
        commit_ms=commit_ms,
        swap_ms=swap_ms,
        before_tokens_per_s=tokens_within(came, pieces, decoding_s, since_s)
        / (since_s - decoding_s),
        receiving_tokens_per_s=receiving,
        lost=sum(count != tokens for count in streams.counts),
        trace=_trace(streams, since_s, until_s),
    )


def _trace(streams: Streams, since_s: float, until_s: float) -> TokenTrace:
    seen = [
        ((at_s - since_s) * 1000, (at_s - before_s) * 1000)
        for times in streams.came
        for before_s, at_s in itertools.pairwise(times)
    ]
    return TokenTrace((until_s - since_s) * 1000, tuple(sorted(seen)))


def figures(measured: Measured, *, requests: int, size_bytes: int) -> dict[str, Any]:
    """The JSON's fields: of each way medians and all rounds, and what they are to each other."""
    ways: dict[str, dict[str, Any]] = {
        way: _of_way(done, size_bytes) for way, done in measured.rounds.items()
    }
    native, paused, staged = (ways[way] for way in WAYS)
    raw_gb_per_s = round(size_bytes / statistics.median(measured.raw_ms) / 1e6, 3)
    copy_ms = _median(measured.copy_ms)
    updates = [done for rounds in measured.rounds.values() for done in rounds]
    return {
        **ways,
        "raw_gb_per_s": raw_gb_per_s,
        "copy_ms": copy_ms,
        "ratio_gap_staged_native": round(staged["gap_ms"] / native["gap_ms"], 3),
        "ratio_gap_paused_native": round(paused["gap_ms"] / native["gap_ms"], 3),
        "gap_over_p99_ms": round(staged["gap_ms"] - staged["step_p99_ms"], 3),
        "receiving_throughput": staged["receiving_tokens_per_s"],
        "ratio_throughput_receiving": statistics.median(
            staged["rounds"]["ratio_throughput_receiving"]
        ),
        "ratio_receive_raw": round(staged["receive_gb_per_s"] / raw_gb_per_s, 3),
        "ratio_swap_copy": round(staged["swap_ms"] / copy_ms, 3),
        "requests_all": len(updates) * requests,
        "requests_lost": sum(done.lost for done in updates),
        "weights_arrived": measured.arrived,
    }


def _of_way(rounds: Sequence[GapRound], size_bytes: int) -> dict[str, Any]:
    steps = [step for done in rounds for step in done.steps_ms]
    each: dict[str, list[float]] = {
        "gap_ms": [done.gap_ms for done in rounds],
        "step_p50_ms": [percentile(done.steps_ms, 50) for done in rounds],
        "step_p99_ms": [percentile(done.steps_ms, 99) for done in rounds],
        "update_ms": [done.update_ms for done in rounds],
        "receive_ms": [done.receive_ms for done in rounds],
        "before_tokens_per_s": [done.before_tokens_per_s for done in rounds],
    }
    if any(done.commit_ms for done in rounds):
        each["commit_ms"] = [done.commit_ms for done in rounds]
    if any(done.swap_ms for done in rounds):
        each["swap_ms"] = [done.swap_ms for done in rounds]
        each["receiving_tokens_per_s"] = [done.receiving_tokens_per_s for done in rounds]
        each["ratio_throughput_receiving"] = [
            done.receiving_tokens_per_s / done.before_tokens_per_s for done in rounds
        ]
    receive_ms = statistics.median(each["receive_ms"])
    return {
        **{name: _median(values) for name, values in each.items() if "ratio" not in name},
        # Of all rounds' steps together.
        "step_p50_ms": round(percentile(steps, 50), 3),
        "step_p99_ms": round(percentile(steps, 99), 3),
        "receive_gb_per_s": round(size_bytes / receive_ms / 1e6, 3),
        "rounds": {name: [round(value, 3) for value in values] for name, values in each.items()},
    }


def typical(rounds: Sequence[GapRound]) -> GapRound:
    """The one whose gap is the median, or next to it."""
    middle_ms = statistics.median(done.gap_ms for done in rounds)
    return min(rounds, key=lambda done: abs(done.gap_ms - middle_ms))


def table(figures: dict[str, Any]) -> str:
    """The same for people."""
    shown = [figures[way] for way in WAYS]
    staged = figures["staged"]
    size = f"{figures['megabytes']:.1f} MB in {figures['tensors']} tensors"
    load = f"{figures['requests']} requests, {figures['rounds']} rounds of each"
    ranks = f", {figures['dp_size']} ranks" if figures.get("dp_size", 1) > 1 else ""
    rows = [
        f"{figures['engine']}{ranks}, {figures['backend']}: {size}, {load}",
        "",
        f"{'ms, median':<26}" + "".join(f"{way:>12}" for way in WAYS),
    ]

    def row(what: str, name: str, form: str = ".1f") -> None:
        rows.append(_row(what, [way.get(name) for way in shown], form))

    row("longest token gap", "gap_ms")
    rows.append(
        _row(
            "  by native's",
            [None, figures["ratio_gap_paused_native"], figures["ratio_gap_staged_native"]],
            ".2f",
        )
    )
    row("ordinary gap, p50", "step_p50_ms")
    row("ordinary gap, p99", "step_p99_ms")
    row("whole update", "update_ms")
    row("first chunk to last ack", "receive_ms")
    row("  GB/s", "receive_gb_per_s", ".2f")
    row("commit", "commit_ms")
    row("  of it without steps", "swap_ms")
    share, now = figures["ratio_throughput_receiving"], staged["receiving_tokens_per_s"]
    raw, copy_ms = figures["raw_gb_per_s"], figures["copy_ms"]
    lost, every = figures["requests_lost"], figures["requests_all"]
    arrived = "arrived" if figures["weights_arrived"] else "did NOT arrive"
    rows.append("")
    rows.append(f"staged, against itself: {share:.0%} of the tokens per second while it receives")
    rows.append(f"  ({now:.0f} of all requests, and {staged['before_tokens_per_s']:.0f} before);")
    rows.append(f"  longest gap {figures['gap_over_p99_ms']:+.1f} ms over the p99 of ordinary ones")
    rows.append(f"received at {figures['ratio_receive_raw']:.2f} x a raw transfer's {raw:.2f} GB/s")
    rows.append(f"swapped in {figures['ratio_swap_copy']:.2f} x one copy's {copy_ms:.1f} ms")
    rows.append(f"{lost} of {every} requests lost; the weights {arrived}")
    if figures.get("not_compared"):
        rows.append(f"not compared: {figures['not_compared']}")
    return "\n".join(rows)


def _row(what: str, cells: Sequence[float | None], form: str) -> str:
    texts = ["" if cell is None else format(cell, form) for cell in cells]
    return (f"{what:<26}" + "".join(f"{text:>12}" for text in texts)).rstrip()


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)
