"""Updates engines while requests decode, in several ways that alternate in one run.

A round starts requests. When all of them decode, the gaps between the next tokens are recorded as
the ordinary ones. Then the engines are updated once. Each request must end with all its tokens. In
the end all engines must serve equal weights, and not those that they began with.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lab.bench.harness import gb_per_s, in_turn, medians, say, title
from lab.bench.streams import gaps_ms, longest_gap_ms, percentile, streaming

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from lab.bench.fleet import UpdatedEngines
    from lab.bench.plans import EnginesPlan
    from lab.bench.streams import Streams

# How many tokens a request decodes before its steps count, and then before the update.
_BEGUN_TOKENS: Final = 8
_ORDINARY_TOKENS: Final = 40


@dataclass(frozen=True, slots=True)
class UpdateRound:
    """The figures of one update under load.

    Attributes:
        figures: ``gap_ms``, the longest gap between two tokens of a request that overlaps the
            update; ``step_p50_ms`` and ``step_p99_ms``, of the gaps before the update;
            ``update_ms``, the update's length; and what a bench adds.
        steps_ms: the gaps before the update.
        lost: how many requests ended with too few tokens.
        tokens: when each token came, in ms from the update's begin, and the gap before it.
        phases_ms: by name of a call, the length of all such calls together.
    """

    figures: dict[str, float]
    steps_ms: Sequence[float]
    lost: int = 0
    tokens: Sequence[tuple[float, float]] = ()
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The results of all rounds that count.

    Attributes:
        rounds: by way, its rounds.
        raw_ms: the time of one broadcast of as many bytes, without bus and engines, for each turn.
        copy_ms: the time of one copy in memory, for each turn.
        arrived: whether all engines serve equal weights in the end, and not their first ones.
    """

    rounds: dict[str, list[UpdateRound]]
    raw_ms: list[float]
    copy_ms: list[float]
    arrived: bool


async def under_load(
    engines: UpdatedEngines, way: str, plan: EnginesPlan
) -> tuple[UpdateRound, dict[str, Any], Streams]:
    """Starts requests, lets them decode for a while, and then makes an update.

    Returns:
        The figures that all benches report; the trainer's answer, with ``decoding_s``, since when
            all requests decode; and the requests' tokens.
    """
    async with streaming(engines.urls[way], plan.requests, plan.tokens) as streams:
        await streams.have(_BEGUN_TOKENS)
        decoding_s = time.monotonic()
        await streams.have(_BEGUN_TOKENS + _ORDINARY_TOKENS)
        answer = {**await engines.update(way), "decoding_s": decoding_s}
    came, since_s, until_s = streams.came, answer["since_s"], answer["until_s"]
    steps = gaps_ms(came, decoding_s, since_s)
    figures = {
        "gap_ms": longest_gap_ms(came, since_s, until_s),
        "step_p50_ms": percentile(steps, 50),
        "step_p99_ms": percentile(steps, 99),
        "update_ms": (until_s - since_s) * 1000,
    }
    tokens = [
        ((at_s - since_s) * 1000, (at_s - before_s) * 1000)
        for times in came
        for before_s, at_s in itertools.pairwise(times)
    ]
    lost = sum(count != plan.tokens for count in streams.counts)
    return UpdateRound(figures, steps, lost, tokens), answer, streams


async def rounds_of(
    engines: UpdatedEngines,
    plan: EnginesPlan,
    one_round: Callable[[UpdatedEngines, str, EnginesPlan], Awaitable[UpdateRound]],
    *,
    copy: bool = True,
) -> Measured:
    """Runs rounds of all ways in turn; the first of each does not count.

    ``one_round`` makes one update in a way. If ``copy``, copies in memory are measured, too.

    Raises:
        BenchFailed: a process died, or a request ended too early: without all its tokens, or before
            its update did.
    """
    before = await engines.serves(next(iter(engines.urls)))

    async def raw_round() -> tuple[float, float]:
        return await engines.raw_ms(), await engines.copy_ms() if copy else 0.0

    def tell(number: int, way: str, done: Any) -> None:
        if way in engines.urls:
            shown = ", ".join(f"{name} {value:.3g}" for name, value in done.figures.items())
            say(f"{title(number)}, {way}: {shown}")

    ways: dict[str, Any] = {way: partial(one_round, engines, way, plan) for way in engines.urls}
    rounds = await in_turn({**ways, "raw": raw_round}, plan.rounds, on_round=tell)
    raw_ms, copy_ms = zip(*rounds.pop("raw"), strict=True)
    after = [await engines.serves(way) for way in ways]
    arrived = all(each == after[0] for each in after) and after[0] != before
    return Measured(rounds, list(raw_ms), list(copy_ms), arrived)


def of_way(rounds: Sequence[UpdateRound], size_bytes: int, moved: str) -> dict[str, Any]:
    """Returns the medians of one way's rounds, and the speed at which it moves ``size_bytes``.

    ``moved`` is the name, without ``_ms``, of the figure with the transfer's time.
    """
    found = medians([done.figures for done in rounds])
    steps = [step for done in rounds for step in done.steps_ms]
    return {
        **found,
        # Of all rounds' steps together.
        "step_p50_ms": round(percentile(steps, 50), 3),
        "step_p99_ms": round(percentile(steps, 99), 3),
        f"{moved}_gb_per_s": gb_per_s(size_bytes, found[f"{moved}_ms"]),
    }
