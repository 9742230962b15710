"""Updates of engines while requests decode, in several ways that alternate in one run.

In a round as many requests as asked for are begun. When all of them decode, they are left alone for
a while: those gaps between tokens are the ordinary ones. Then comes one update. Each request must
end with all its tokens. In the end all engines must serve the same, and another thing than before.
"""

from __future__ import annotations

import itertools
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sidecar.bench.fleet import NATIVE, ServedAnswer, fleet, raw_ends
from sidecar.bench.harness import gb_per_s, in_turn, medians, say, title
from sidecar.bench.streams import (
    gaps_ms,
    greedy,
    longest_gap_ms,
    percentile,
    streaming,
    tokens_within,
)
from sidecar.supervision.launch import free_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from sidecar.bench.harness import Bench, Worker
    from sidecar.bench.plans import EnginesPlan
    from sidecar.bench.streams import Streams

BUS: Final = "bus"
# A request decodes so many tokens before its steps count, and so many of these are ordinary ones.
_BEGUN_TOKENS: Final = 8
_ORDINARY_TOKENS: Final = 40
_GREEDY_TOKENS: Final = 24
# A parameter of experts, by vLLM's name for it; and what is said where those are left out.
_EXPERTS: Final = ".routed_experts."
_LEFT_OUT: Final = "native's tokens and experts, which its own update leaves unpacked on a CPU"


@dataclass(frozen=True)
class UpdatedEngines:
    """Trainer and engines, and how to ask them.

    Attributes:
        update: makes one update of a way, and returns what it took.
        urls: of each way, where its engines take requests, rank by rank.
        engines: of each way, those who tell of their calls.
        raw_ms: one transfer of ``size_bytes`` with nothing around it.
        copy_ms: one copy of ``size_bytes`` within an engine's memory.
        serves: what a way's engines serve now; alike where that is the same.
        not_compared: what of it is left out there, and why.
    """

    update: Callable[[str], Awaitable[dict[str, Any]]]
    urls: Mapping[str, Sequence[str]]
    engines: Mapping[str, Sequence[Worker]]
    raw_ms: Callable[[], Awaitable[float]]
    copy_ms: Callable[[], Awaitable[float]]
    serves: Callable[[str], Awaitable[object]]
    size_bytes: int
    tensors: int
    not_compared: str = ""


@dataclass(frozen=True, slots=True)
class UpdateRound:
    """One update under load.

    Attributes:
        figures: ``gap_ms``, the longest gap of any request that some part of the update is in;
            ``step_p50_ms`` and ``step_p99_ms`` of ordinary gaps; ``update_ms``, from its first
            message to its last; and what a bench adds.
        steps_ms: ordinary gaps, before it.
        lost: requests that ended with fewer tokens.
        tokens: when each came, in ms from the update's begin, and how long after the one before of
            its request.
        phases_ms: how long calls took, by name.
    """

    figures: dict[str, float]
    steps_ms: Sequence[float]
    lost: int = 0
    tokens: Sequence[tuple[float, float]] = ()
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """All counted rounds. ``raw_ms``, ``copy_ms``: one of each per round."""

    rounds: dict[str, list[UpdateRound]]
    raw_ms: list[float]
    copy_ms: list[float]
    arrived: bool


@dataclass(frozen=True, slots=True)
class LoadedUpdate:
    """What was seen of one update: when tokens came, and what its trainer says of it."""

    streams: Streams
    decoding_s: float
    answer: dict[str, Any]

    def tokens_per_s(self, since_s: float, until_s: float) -> float:
        """Of all requests together."""
        made = tokens_within(self.streams.came, self.streams.pieces, since_s, until_s)
        return made / (until_s - since_s)

    def round(self, tokens: int) -> UpdateRound:
        """The figures that all benches have, of requests of so many tokens."""
        came, since_s, until_s = self.streams.came, self.answer["since_s"], self.answer["until_s"]
        steps = gaps_ms(came, self.decoding_s, since_s)
        found = {
            "gap_ms": longest_gap_ms(came, since_s, until_s),
            "step_p50_ms": percentile(steps, 50),
            "step_p99_ms": percentile(steps, 99),
            "update_ms": (until_s - since_s) * 1000,
        }
        seen = [
            ((at_s - since_s) * 1000, (at_s - before_s) * 1000)
            for times in came
            for before_s, at_s in itertools.pairwise(times)
        ]
        lost = sum(count != tokens for count in self.streams.counts)
        return UpdateRound(found, steps, lost, seen)


async def under_load(engines: UpdatedEngines, way: str, plan: EnginesPlan) -> LoadedUpdate:
    """Begin requests; when all decode, leave them alone for a while, and then update."""
    async with streaming(engines.urls[way], plan.requests, plan.tokens) as streams:
        await streams.have(_BEGUN_TOKENS)
        decoding_s = time.monotonic()
        await streams.have(_BEGUN_TOKENS + _ORDINARY_TOKENS)
        answer = await engines.update(way)
    return LoadedUpdate(streams, decoding_s, answer)


async def rounds_of(
    engines: UpdatedEngines,
    plan: EnginesPlan,
    one_round: Callable[[UpdatedEngines, str, EnginesPlan], Awaitable[UpdateRound]],
    *,
    copy: bool = True,
) -> Measured:
    """Alternate. The first round of each way is not counted. ``copy``: copies are measured, too.

    Raises:
        BenchFailed: a process died, or a request ended without all its tokens, or before the
            update did.
    """
    before = await engines.serves(NATIVE)
    raw: list[float] = []
    copies: list[float] = []

    async def raw_round() -> None:
        raw.append(await engines.raw_ms())
        if copy:
            copies.append(await engines.copy_ms())

    def tell(number: int, way: str, done: UpdateRound | None) -> None:
        if done:
            shown = ", ".join(f"{name} {value:.3g}" for name, value in done.figures.items())
            say(f"{title(number)}, {way}: {shown}")

    ways: dict[str, Any] = {way: partial(one_round, engines, way, plan) for way in engines.urls}
    rounds = await in_turn({**ways, "raw": raw_round}, plan.rounds, on_round=tell)
    after = [await engines.serves(way) for way in ways]
    arrived = all(each == after[0] for each in after) and after[0] != before
    return Measured({way: rounds[way] for way in ways}, raw[1:], copies[1:], arrived)


def of_way(rounds: Sequence[UpdateRound], size_bytes: int, moved: str) -> dict[str, Any]:
    """Medians of one way. ``moved``: the word for its transfer, in ``<moved>_ms``."""
    found = medians([done.figures for done in rounds])
    steps = [step for done in rounds for step in done.steps_ms]
    return {
        **found,
        # Of all rounds' steps together.
        "step_p50_ms": round(percentile(steps, 50), 3),
        "step_p99_ms": round(percentile(steps, 99), 3),
        f"{moved}_gb_per_s": gb_per_s(size_bytes, found[f"{moved}_ms"]),
    }


async def embedded(bench: Bench, plan: EnginesPlan, ways: Mapping[str, str]) -> UpdatedEngines:
    """Start a broker, a trainer and two groups, each engine in a process of its own.

    One group is on the bus, the other one's engines are called directly. Where memory can be lent,
    it is, in all ways.
    """
    checkpoint = bench.folder() / "checkpoint"
    address = await bench.broker()
    trainer, made = await bench.start(
        "embedded_trainer",
        broker=address,
        group=BUS,
        folder=str(checkpoint),
        shape="mixture",
        amount=plan.megabytes,
        backend=plan.over,
        lent=plan.over == "shm",
        chunk_bytes=plan.chunk_bytes,
    )
    engines: dict[str, list[Worker]] = {}
    urls: dict[str, list[str]] = {}
    sockets = [str(bench.folder() / "calls") for _ in range(plan.dp_size)]
    for group, broker in ((NATIVE, ""), (BUS, address)):
        master = f"127.0.0.1:{free_port()}"
        engines[group] = [
            await bench.launch(
                "embedded_engine",
                name=f"{group}-{rank}",
                folder=str(checkpoint),
                group=group,
                broker=broker,
                socket=sockets[rank],
                rank=rank,
                ranks=plan.dp_size,
                master=master,
                max_num_seqs=-(-plan.requests // plan.dp_size),
            )
            for rank in range(plan.dp_size)
        ]
        urls[group] = [(await engine.hello())["url"] for engine in engines[group]]
    shutil.rmtree(checkpoint)  # the engines have it in memory
    await trainer.ask("open", engines=plan.dp_size, sockets=sockets)

    async def copy_ms() -> float:
        return float(await trainer.ask("memcpy_ms"))

    raw_ms = copy_ms
    if plan.over != "shm":
        raw_ms = (await raw_ends(bench, "cpu", made["size_bytes"])).raw_ms

    async def update(way: str) -> dict[str, Any]:
        if way == "native":
            return dict(await trainer.ask("native", clear_cache=plan.clear_cache))
        return dict(await trainer.ask("update", how=way, clear_cache=plan.clear_cache))

    async def serves(way: str) -> object:
        group = ways[way]
        return [
            (await greedy(url, _GREEDY_TOKENS), await engine.ask("sums"))
            for url, engine in zip(urls[group], engines[group], strict=True)
        ]

    return UpdatedEngines(
        update=update,
        urls={way: urls[group] for way, group in ways.items()},
        engines={way: engines[group] for way, group in ways.items()},
        raw_ms=raw_ms,
        copy_ms=copy_ms,
        serves=serves,
        **made,
    )


async def vllm(bench: Bench, plan: EnginesPlan, ways: Mapping[str, str]) -> UpdatedEngines:
    """Start a trainer and servers: vLLM alone, and others with a sidecar; or DP groups.

    In the end all serve the same, by their tokens and their weights' checksums. But for one thing:
    vLLM packs a mixture's experts for its CPU kernels when they are first loaded, and at no update
    after that (0.32; see :mod:`sidecar.vllm.plugin.loading.cpu`). So on a CPU what it updates by
    itself has unpacked experts in memory that is read as packed, and answers otherwise. There its
    experts and its answers are compared with nothing, and the others' answers with those of the
    trainer's own model.
    """
    engines = {name: "wavebus" if name == BUS else plan.native for name in ways.values()}
    servers = await fleet(bench, plan, engines)
    unpacked = plan.mixture and plan.device == "cpu"
    expected = await servers.expected() if unpacked else ()

    async def serves(way: str) -> object:
        served = await servers.serves(ways[way])
        if not unpacked:
            return served
        return [without_experts(each, expected if way == NATIVE else ()) for each in served]

    return UpdatedEngines(
        update=servers.update,
        urls={way: servers.urls[name] for way, name in ways.items()},
        engines={way: servers.servers[name] for way, name in ways.items()},
        raw_ms=servers.ends.raw_ms,
        copy_ms=servers.ends.copy_ms,
        serves=serves,
        **servers.made,
        not_compared=_LEFT_OUT if unpacked else "",
    )


def without_experts(served: ServedAnswer, expected: tuple[int, ...] = ()) -> ServedAnswer:
    """What is compared where experts are not: the other weights, and the tokens, or else those that
    are expected in their place."""
    sums = {name: sum_ for name, sum_ in served.checksums.items() if _EXPERTS not in name}
    return ServedAnswer(expected or served.tokens, sums)
