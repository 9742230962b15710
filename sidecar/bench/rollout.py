"""What the rollout client costs, against aiohttp alone and against vllm-router.

Ways to ask alternate in one run, each in a process of its own, before the same paced engines:

- **client**: the rollout client.
- **bare**: aiohttp that streams and parses the same, and goes round the engines.
- **router**: the same through vllm-router, by ``consistent_hash``; if that is installed.

Then many streams are live at once, and engines get SIGKILL while the client streams from them.
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
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from sidecar.bench.gap.engine_process import GapEngineSettings
from sidecar.bench.processes import VLLM_ON_CPU, BenchFailed, run_module, worker
from sidecar.bench.streams import percentile
from sidecar.bench.vllm_server import VllmServerSettings
from sidecar.supervision.launch import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.processes import Worker

    Progress = Callable[[str], None]
    Figures = dict[str, Any]

_ENGINES: Final = 4
_STEP_MS: Final = 20.0
_STREAMS: Final = 64
_TOKENS: Final = 100
_WAVES: Final = 10
_LIVE_TOKENS: Final = 400  # none may end before all have begun
_BOOT_S: Final = 400.0
_KILL_AFTER_S: Final = 0.5
# What is compared: its name, its unit, the client's rounds, and the other way's.
_PAIRS: Final = (
    ("token_ms", "token_ms", "client_1", "bare_1"),
    ("tokens_per_s", "tokens_per_s", "client", "bare"),
    ("cpu_us_per_token", "cpu_us", "client", "bare"),
    ("timed_tokens_per_s", "tokens_per_s", "client_timed", "router"),
    ("ttft_ms", "ttft_ms", "client_timed", "router"),
)


@dataclass(frozen=True)
class RolloutPlan:
    """``kills``: engines that get SIGKILL; ``live``: streams at once; ``vllm``: also count prefix
    cache hits, of two servers."""

    rounds: int
    kills: int
    live: int
    vllm: bool


class RolloutBench:
    """The processes of one run, which last as long as ``stack``."""

    def __init__(self, stack: contextlib.AsyncExitStack, loop: LoopChoice, say: Progress) -> None:
        self._stack = stack
        self._loop = loop
        self._say = say
        self._numbers = count()

    async def start(self, module: str, *args: object, **how: Any) -> Worker:
        """A process of the bench."""
        return await self._stack.enter_async_context(worker(module, *args, self._loop, **how))

    async def boot(self) -> list[tuple[str, Worker, str]]:
        """The broker and the engines, each with its name and URL."""
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-"))
        self._checkpoint = Path(folder) / "checkpoint"
        # By name: the two roles never import each other.
        await run_module("trainer_agent.demo.policy", self._checkpoint, 0)
        self._address = (await (await self.start("sidecar.bench.broker")).answer())["address"]
        return list(await asyncio.gather(*(self.start_engine() for _ in range(_ENGINES))))

    async def start_engine(self) -> tuple[str, Worker, str]:
        """Another engine. It has more slots than streams: a session's may have 1.25 times the mean
        of them."""
        number, checkpoint = next(self._numbers), str(self._checkpoint)
        settings = GapEngineSettings(
            checkpoint, "policy", 384, self._address, number, step_ms=_STEP_MS
        )
        engine = await self.start("sidecar.bench.gap.engine_process", settings.to_json())
        return f"policy-{number}", engine, (await engine.answer())["url"]

    async def start_asking(self, group: str, urls: list[str]) -> None:
        """Who asks these, by each way that there is here."""
        self._urls = {"client": list[str](), "bare": urls}
        if find_spec("vllm_router") is not None:
            self._urls["router"] = [await self._stack.enter_async_context(_router(urls))]
        self.ways = {
            way: await self.start(
                "trainer_agent.bench.rollout", self._address if way == "client" else "-", group
            )
            for way in self._urls
        }

    async def wave(self, way: str, streams: int, tokens: int, **more: Any) -> Figures:
        """What one wave took."""
        name = f"{way}-{next(self._numbers)}"
        wave = {"name": name, "streams": streams, "tokens": tokens, "urls": self._urls[way], **more}
        return await self.ways[way].ask(json.dumps(wave))

    async def compare(self, rounds: int) -> Figures:
        """All ways in turn, with one stream and with many."""
        found: dict[str, list[Figures]] = defaultdict(list)
        runs = [("client_1", 1, False), ("bare_1", 1, False), ("client", _STREAMS, False)]
        runs += [("bare", _STREAMS, False), ("client_timed", _STREAMS, True)]
        runs += [("router", _STREAMS, True)] if "router" in self.ways else []
        for number in range(-1, rounds):
            self._say(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
            for name, streams, timed in runs[:: 1 if number % 2 else -1]:
                took = await self.wave(name.split("_")[0], streams, _TOKENS, timed=timed)
                if took["tokens"] != streams * _TOKENS:
                    raise BenchFailed(f"{name}: {took['tokens']} tokens")
                took["token_ms"] = took["wall_s"] * 1000 / _TOKENS
                took["tokens_per_s"] = took["tokens"] / took["wall_s"]
                took["cpu_us"] = took["cpu_s"] * 1e6 / took["tokens"]
                took["ttft_ms"] = statistics.median(took["ttft_ms"] or [0.0])
                found[name] += [took] if number >= 0 else []
        figures: Figures = {}
        for name, unit, ours, theirs in _PAIRS:
            pairs = [(a[unit], b[unit]) for a, b in zip(found[ours], found[theirs], strict=False)]
            if pairs:
                way = theirs.split("_")[0]
                figures[f"{name}_client"] = round(statistics.median(a for a, _ in pairs), 2)
                figures[f"{name}_{way}"] = round(statistics.median(b for _, b in pairs), 2)
                figures[f"ratio_{name}"] = round(statistics.median(a / b for a, b in pairs), 3)
        return figures

    async def live(self, streams: int) -> Figures:
        """The client's memory, with so many streams at once, ten times."""
        self._say(f"{_WAVES} waves of {streams} streams")
        more = {"timed": True, "until_live": True}
        waves = [
            await self.wave("client", streams, _LIVE_TOKENS, **more) for _ in range(_WAVES + 1)
        ][1:]  # the first one warms up
        memory = [round(each["rss_mb"], 1) for each in waves]
        return {
            "live_streams": min(each["live"] for each in waves),
            "live_rss_mb": memory,
            "ratio_live_rss": round(memory[-1] / memory[0], 3),
        }

    async def kill(self, engines: list[tuple[str, Worker, str]], kills: int) -> Figures:
        """From the SIGKILL of an engine to the next token of each answer that it was giving."""
        took_ms: list[float] = []
        for number in range(kills):
            name, victim, _ = engines.pop(0)
            wave = asyncio.create_task(self.wave("client", 4 * _ENGINES, _TOKENS, timed=True))
            await asyncio.sleep(_KILL_AFTER_S)
            killed_s = time.monotonic()
            await victim.kill()
            engines.append(await self.start_engine())
            seams = [when_s for engine, when_s in (await wave)["seams"] if engine == name]
            took_ms += [(when_s - killed_s) * 1000 for when_s in seams]
            self._say(f"kill {number + 1} of {kills}: {len(seams)} answers went on elsewhere")
        if not took_ms:
            return {}
        p50, p99 = (round(percentile(took_ms, percent), 1) for percent in (50, 99))
        return {"kill_answers": len(took_ms), "kill_p50_ms": p50, "kill_p99_ms": p99}

    async def prefix_hits(self, rounds: int) -> Figures:
        """How many prompt tokens two servers had in their caches, of sessions by each way."""
        self._say("starting 2 vLLM servers")
        env = {name: os.environ.get(name, value) for name, value in VLLM_ON_CPU.items()}
        argv = (
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._checkpoint), "--skip-tokenizer-init", "--enforce-eager"),
            *("--dtype=float32", f"--max-num-seqs={_STREAMS}", "--max-model-len=512"),
            *("--block-size=32", "--enable-prefix-caching"),
        )
        urls: list[str] = []
        for name in ("server-0", "server-1"):
            settings = VllmServerSettings(argv, env, self._address, "vllm", name=name)
            module = "sidecar.bench.vllm_server"
            server = await self.start(module, settings.to_json(), answer_s=_BOOT_S, grace_s=40.0)
            urls.append((await server.answer())["url"])
        await self.start_asking("vllm", urls)
        hits: Counter[str] = Counter()
        async with aiohttp.ClientSession() as session:
            for _ in range(rounds):
                for way in self.ways:
                    before = await _cache_hits(session, urls)
                    await self.wave(way, 16, 48, turns=4)
                    hits[f"prefix_hits_{way}"] += await _cache_hits(session, urls) - before
        return dict(hits)


async def measure(plan: RolloutPlan, loop: LoopChoice, say: Progress) -> Figures:
    """The JSON's fields.

    Raises:
        BenchFailed: a process died, or a request failed.
    """
    figures: Figures = {**asdict(plan), "engines": _ENGINES, "step_ms": _STEP_MS}
    figures["router"] = version("vllm-router") if find_spec("vllm_router") else None
    if not figures["router"]:
        say("not compared with vllm-router, which is not installed: pip install 'wavebus[router]'")
    async with contextlib.AsyncExitStack() as stack:
        bench = RolloutBench(stack, loop, say)
        engines = await bench.boot()
        await bench.start_asking("policy", [url for *_, url in engines])
        figures |= await bench.compare(plan.rounds)
        figures |= await bench.live(plan.live)
        figures |= await bench.kill(engines, plan.kills)
        figures |= await bench.prefix_hits(plan.rounds) if plan.vllm else {}
    return figures


def table(figures: Figures) -> str:
    """The same for people."""
    shown = dict(figures, router=figures["router"] or "not installed")
    return "\n".join(f"{name:28} {value}" for name, value in shown.items())


@contextlib.asynccontextmanager
async def _router(urls: list[str]) -> AsyncIterator[str]:
    """A vllm-router before these; its URL."""
    port, metrics = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
        *("--worker-startup-check-interval", "1", "--worker-urls", *urls),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_BOOT_S), aiohttp.ClientSession() as session:
            while not await _serves(session, url):
                if process.returncode is not None:
                    raise BenchFailed(f"vllm-router ended with code {process.returncode}")
                await asyncio.sleep(0.1)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serves(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.ok
    except aiohttp.ClientError:
        return False


async def _cache_hits(session: aiohttp.ClientSession, urls: list[str]) -> int:
    total = 0.0
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        hits = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
        total += sum(float(line.split()[-1]) for line in hits)
    return int(total)
