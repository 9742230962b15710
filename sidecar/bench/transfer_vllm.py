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

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import aiohttp
import torch

from bus.errors import UsageError
from sidecar.bench.processes import VLLM_ON_CPU, Worker, worker
from sidecar.bench.serving import Settings
from sidecar.bench.streams import (
    PROMPT_TOKENS,
    gaps_ms,
    greedy,
    longest_gap_ms,
    percentile,
    streaming,
)
from sidecar.bench.window import Window, window
from sidecar.launch import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bus.runtime.loop import LoopChoice

    Progress = Callable[[str], None]

Device: TypeAlias = Literal["cuda", "cpu"]
Model: TypeAlias = Literal["8b", "tiny"]
Way: TypeAlias = Literal["native", "bus_native", "bus"]

WAYS: Final[tuple[Way, ...]] = ("native", "bus_native", "bus")
_GPUS: Final = 2
_WARM_ROUNDS: Final = 1
_ANSWER_S: Final = 400.0  # booting, and meeting for the first time
_GRACE_S: Final = 40.0
# A request decodes so many tokens before its steps count, and so many of these are ordinary ones.
_BEGUN_TOKENS: Final = 8
_ORDINARY_TOKENS: Final = 40
_MAX_MODEL_LEN: Final = 1024
_GREEDY_TOKENS: Final = 24
_KV_CACHE_TOKEN_BYTES: Final = 2 * 36 * 8 * 128 * 2  # keys and values of the large model, in bf16
_KV_CACHE_SPARE: Final = 1.5


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        native_engine: the trainer and worker engine of vLLM's, by its name there.
        backend: of wavebus's, for ``bus``; with ``chunk_bytes`` and ``packed``.
        tokens: of each request.
    """

    model: Model
    device: Device
    native_engine: str
    backend: str
    chunk_bytes: int
    packed: bool
    rounds: int
    requests: int
    tokens: int

    def check(self) -> None:
        """Whether this can run here.

        Raises:
            UsageError: says what is missing.
        """
        if self.device == "cpu":
            if self.native_engine == "nccl":
                raise UsageError(
                    "vLLM's own trainer engines need CUDA: on a CPU name one of a plugin of yours "
                    "with --native-engine"
                )
            return
        count = torch.cuda.device_count()
        if count < _GPUS:
            raise UsageError(f"{_GPUS} GPUs are needed, and there are {count}: see --device cpu")


@dataclass(frozen=True, slots=True)
class Round:
    """One update under load; times in ms. ``transfer_ms``: until all is received and loaded."""

    gap_ms: float
    steps_ms: list[float]
    update_ms: float
    transfer_ms: float
    window: Window


@dataclass(frozen=True)
class Running:
    """All processes, and how to ask them."""

    plan: Plan
    trainer: Worker
    servers: dict[Way, Worker]
    urls: dict[Way, str]
    ends: tuple[Worker, Worker]

    async def raw_ms(self) -> float:
        """Until both ends are done."""
        told = await asyncio.gather(*(end.ask("go") for end in self.ends))
        return max(float(end["broadcast_ms"]) for end in told)

    async def round(self, way: Way) -> Round:
        """One update of a server whose requests decode."""
        plan = self.plan
        server = self.servers[way]
        if way != "native":
            await server.ask("calls")  # what was called before is none of its
        async with streaming(self.urls[way], plan.requests, plan.tokens) as streams:
            await streams.have(_BEGUN_TOKENS)
            decoding_s = time.monotonic()
            await streams.have(_BEGUN_TOKENS + _ORDINARY_TOKENS)
            told = await self.trainer.ask(way)
        since_s, until_s = told["since_s"], told["until_s"]
        calls = [tuple(call) for call in told["calls"]]
        if way != "native":
            calls += [tuple(call) for call in (await server.ask("calls"))["calls"]]
        seen = window(calls, told["window_ms"])
        return Round(
            longest_gap_ms(streams.came, since_s, until_s),
            gaps_ms(streams.came, decoding_s, since_s),
            (until_s - since_s) * 1000,
            # vLLM's own engines receive and load in one call.
            told.get("transfer_ms", seen.phases_ms.get("update", 0.0)),
            seen,
        )

    async def serves(self, way: Way) -> tuple[list[int], dict[str, str]]:
        """What a server answers with, and vLLM's own checksums of its weights."""
        url = self.urls[way]
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{url}/weight_checker", json={"action": "checksum"}, raise_for_status=True
            ) as response,
        ):
            sums = dict((await response.json())["checksums"])
        return await greedy(url, _GREEDY_TOKENS), sums


async def measure(
    plan: Plan, loop: LoopChoice, say: Progress, *, logs: Path | None = None
) -> dict[str, Any]:
    """The JSON's fields: medians, and ratios of just these.

    Args:
        logs: a folder that keeps what all processes log.

    Raises:
        UsageError: it can't run here.
        BenchBroken: a process died, or a request ended without all its tokens.
    """
    plan.check()
    began_s = time.monotonic()
    async with _running(plan, loop, say, logs) as (running, made):
        booted_s = time.monotonic() - began_s
        say(f"booted in {booted_s:.0f} s: {made['size_bytes'] / 1e9:.2f} GB")
        before = await running.serves("native")
        raw: list[float] = []
        rounds: dict[Way, list[Round]] = {way: [] for way in WAYS}
        for index in range(-_WARM_ROUNDS, plan.rounds):
            for way in WAYS:
                done = await running.round(way)
                say(f"{_name(index)} {way}: gap {done.gap_ms:.0f} ms")
                if index >= 0:
                    rounds[way].append(done)
            took_ms = await running.raw_ms()
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


def figures(rounds: dict[Way, list[Round]], raw_ms: list[float], size_bytes: int) -> dict[str, Any]:
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
    row("pause to resume", [way["window_ms"] for way in shown])
    row("  control plane", [way["control_ms"] for way in shown])
    row("    other calls", [way["control_asks_ms"] for way in shown])
    row("    messages", [way["control_idle_ms"] for way in shown])
    row("  its share", [way["control_share"] for way in shown], ".1%")
    rows.append("calls")
    for phase in dict.fromkeys(name for way in shown for name in way["phases_ms"]):
        row(f"  {phase}", [way["phases_ms"].get(phase) for way in shown])
    row("transfer and load", [way["transfer_ms"] for way in shown])
    row("  GB/s", [way["transfer_gb_per_s"] for way in shown])
    row("  by raw's", [figures[f"ratio_raw_{way}"] for way in WAYS], ".2f")
    rows.append(f"raw broadcast: {figures['raw_ms']:.1f} ms, {figures['raw_gb_per_s']:.1f} GB/s")
    return "\n".join(rows)


def _medians(rounds: Sequence[Round], size_bytes: int) -> dict[str, Any]:
    windows = [done.window for done in rounds]
    steps = [step for done in rounds for step in done.steps_ms]
    transfer_ms = statistics.median(done.transfer_ms for done in rounds)
    phases = list(dict.fromkeys(name for seen in windows for name in seen.phases_ms))
    shares = [seen.control_ms / seen.window_ms for seen in windows]
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


async def _arrived(running: Running, before: tuple[list[int], dict[str, str]]) -> bool:
    """Whether all servers serve the same by now, and another thing than before."""
    after = [await running.serves(way) for way in WAYS]
    return all(each == after[0] for each in after) and after[0][0] != before[0]


@contextlib.asynccontextmanager
async def _running(
    plan: Plan, loop: LoopChoice, say: Progress, logs: Path | None
) -> AsyncIterator[tuple[Running, dict[str, Any]]]:
    """Everything, for the length of a block, and what the trainer made."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, module: str, *args: object, **how: Any) -> Worker:
            log_path = None if logs is None else logs / f"{name}.log"
            started = worker(module, *args, loop, answer_s=_ANSWER_S, log_path=log_path, **how)
            return await stack.enter_async_context(started)

        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-"))
        model = Path(folder) / "model"
        broker = await stack.enter_async_context(worker("sidecar.bench.broker", loop))
        address = (await broker.answer())["address"]
        groups = {way: way.replace("_", "-") for way in WAYS}
        # By name: the two roles never import each other.
        trainer = await start(
            "trainer",
            "trainer_agent.bench_vllm",
            json.dumps(_trainer_settings(plan, address, groups, model)),
            env={"VLLM_LOGGING_STREAM": "ext://sys.stderr"},  # it answers on stdout
        )
        made = await trainer.answer()
        say(f"starting three servers of {plan.model}")
        servers: dict[Way, Worker] = {}
        for way in WAYS:
            told = _server_settings(plan, way, groups[way], address, model).to_json()
            servers[way] = await start(way, "sidecar.bench.serving", told, grace_s=_GRACE_S)
        urls = {way: (await server.answer())["url"] for way, server in servers.items()}
        port = free_port()
        first, second = [
            await start(
                f"raw-{rank}",
                "sidecar.bench.broadcast",
                *(rank, port, plan.device, made["size_bytes"]),
            )
            for rank in range(_GPUS)
        ]
        await asyncio.gather(first.answer(), second.answer())
        await trainer.ask(urls["native"])
        yield Running(plan, trainer, servers, urls, (first, second)), made


def _trainer_settings(
    plan: Plan, address: str, groups: dict[Way, str], model: Path
) -> dict[str, Any]:
    return {
        "broker": address,
        "groups": groups,
        "folder": str(model),
        "model": plan.model,
        "device": "cuda:0" if plan.device == "cuda" else "cpu",
        "native_engine": plan.native_engine,
        "backend": plan.backend,
        "chunk_bytes": plan.chunk_bytes,
        "packed": plan.packed,
    }


def _server_settings(plan: Plan, way: Way, group: str, address: str, model: Path) -> Settings:
    cpu = plan.device == "cpu"
    backend = "wavebus" if way == "bus" else plan.native_engine
    argv = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name=bench", "--load-format=dummy", "--skip-tokenizer-init"),
        *("--enforce-eager", f"--max-num-seqs={plan.requests}"),
        *(f"--max-model-len={_MAX_MODEL_LEN}", "--no-enable-prefix-caching"),
        *("--weight-transfer-config", json.dumps({"backend": backend})),
        *(
            ("--dtype=float32",)
            if cpu
            # Three boot at once: none may measure what is free.
            else (
                "--dtype=bfloat16",
                "--gpu-memory-utilization=0.05",
                f"--kv-cache-memory-bytes={_kv_cache_bytes(plan)}",
            )
        ),
    )
    env = (
        {name: os.environ.get(name, value) for name, value in VLLM_ON_CPU.items()}
        if cpu
        else {"CUDA_VISIBLE_DEVICES": _second_gpu()}
    )
    if way == "native":
        return Settings(argv, env)
    return Settings(argv, env, address, group)


def _kv_cache_bytes(plan: Plan) -> int:
    """Enough for all requests at once: one that is put off would make a gap of its own."""
    tokens = plan.requests * (PROMPT_TOKENS + plan.tokens) + _MAX_MODEL_LEN
    return int(tokens * _KV_CACHE_TOKEN_BYTES * _KV_CACHE_SPARE)


def _second_gpu() -> str:
    """As the variable names it."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[1] if seen else "1"
