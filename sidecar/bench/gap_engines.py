"""The engines of ``bench gap``, whose ways are updated in turn: embedded ones, or vLLM servers.

Embedded: a broker, a trainer and two groups, each engine in a process of its own. One group is on
the bus, the other one's engines are called directly.

vLLM: a server of vLLM's alone, and one with a sidecar; or two DP groups. In the end all serve the
same, by their tokens and their weights' checksums. But for one thing: vLLM packs a mixture's
experts for its CPU kernels when they are first loaded, and at no update after that (0.32; see
:mod:`sidecar.vllm.plugin.loading.cpu`). So on a CPU what it updates by itself has unpacked experts
in memory that is read as packed, and answers otherwise. There its experts and its answers are
compared with nothing, and the others' answers with those of the trainer's own model.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sidecar.bench.fleet import NATIVE, ServedAnswer, fleet, raw_ends
from sidecar.bench.streams import greedy
from sidecar.supervision.launch import free_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from sidecar.bench.harness import Bench, Worker
    from sidecar.bench.plans import GapPlan

_BUS: Final = "bus"
_OF_WAY: Final = {"native": NATIVE, "paused": _BUS, "staged": _BUS}
_GREEDY_TOKENS: Final = 24
# A parameter of experts, by vLLM's name for it; and what is said where those are left out.
_EXPERTS: Final = ".routed_experts."
_LEFT_OUT: Final = "native's tokens and experts, which its own update leaves unpacked on a CPU"


@dataclass(frozen=True)
class GapEngines:
    """Trainer and engines, and how to ask them.

    Attributes:
        update: makes one update of a way, and returns what it took.
        urls: of each way, where its engines take requests, rank by rank.
        engines: of each way, those who tell of their last swap.
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


async def embedded(bench: Bench, plan: GapPlan) -> GapEngines:
    """Start all. Where memory can be lent, it is, in all ways."""
    checkpoint = bench.folder() / "checkpoint"
    address = await bench.broker()
    trainer, made = await bench.start(
        "embedded_trainer",
        broker=address,
        group=_BUS,
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
    for group, broker in ((NATIVE, ""), (_BUS, address)):
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
        group = _OF_WAY[way]
        return [
            (await greedy(url, _GREEDY_TOKENS), await engine.ask("sums"))
            for url, engine in zip(urls[group], engines[group], strict=True)
        ]

    return GapEngines(
        update=update,
        urls={way: urls[group] for way, group in _OF_WAY.items()},
        engines={way: engines[group] for way, group in _OF_WAY.items()},
        raw_ms=raw_ms,
        copy_ms=copy_ms,
        serves=serves,
        **made,
    )


async def vllm(bench: Bench, plan: GapPlan) -> GapEngines:
    """Start all."""
    servers = await fleet(bench, plan, {NATIVE: plan.native, _BUS: "wavebus"})
    unpacked = plan.mixture and plan.device == "cpu"
    expected = await servers.expected() if unpacked else ()

    async def serves(way: str) -> object:
        served = await servers.serves(_OF_WAY[way])
        if not unpacked:
            return served
        return [without_experts(each, expected if way == "native" else ()) for each in served]

    return GapEngines(
        update=servers.update,
        urls={way: servers.urls[name] for way, name in _OF_WAY.items()},
        engines={way: servers.servers[name] for way, name in _OF_WAY.items()},
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
