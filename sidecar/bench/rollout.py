"""What the rollout client costs, against aiohttp alone and against vllm-router.

Ways to ask alternate in one run, each in a process of its own, before the same paced engines:

- **client**: the rollout client.
- **bare**: aiohttp that streams and parses the same, and spreads requests over the engines in turn.
- **router**: the same through vllm-router, by ``consistent_hash``; if that is installed.

Then engines get SIGKILL while the client streams from them, and it streams from many at once.
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
from dataclasses import asdict, dataclass, field
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
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.processes import Worker

    Progress = Callable[[str], None]
    Figures = dict[str, Any]

GROUP: Final = "policy"
_ENGINES: Final = 4
_STEP_MS: Final = 20.0
_STREAMS: Final = 64
_TOKENS: Final = 100
_SLOTS: Final = 384  # a session's engine may have 1.25 times the mean of them
_WAVES: Final = 10
_LIVE_TOKENS: Final = 128
_VLLM_TURNS: Final = 4
_VLLM_TOKENS: Final = 48
_VLLM_STREAMS: Final = 16
_BOOT_S: Final = 400.0
_KILL_AFTER_S: Final = 0.5
_VLLM_GROUP: Final = "vllm"
_HITS: Final = "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class RolloutPlan:
    """``kills``: how many engines get SIGKILL; ``live``: streams at once; ``vllm``: also prefix
    cache hits of two servers."""

    rounds: int
    kills: int
    live: int
    vllm: bool


@dataclass
class Setting:
    """The processes, and where requests go by each way: nowhere for the client, which knows."""

    asking: dict[str, Worker]
    urls: dict[str, list[str]]
    waves: count[int] = field(default_factory=count)

    async def wave(self, way: str, streams: int, tokens: int, **more: Any) -> Figures:
        """What one wave took."""
        wave = {"name": f"{way}-{next(self.waves)}", "streams": streams, "tokens": tokens, **more}
        figures = await self.asking[way].ask(json.dumps(wave | {"urls": self.urls[way]}))
        if figures["tokens"] != streams * tokens * more.get("turns", 1):
            raise BenchFailed(f"{way}: {figures['tokens']} tokens of {wave}")
        return figures


async def measure(plan: RolloutPlan, loop: LoopChoice, say: Progress) -> Figures:
    """The JSON's fields.

    Raises:
        BenchFailed: a process died, or a request failed.
    """
    figures: Figures = {**asdict(plan), "engines": _ENGINES, "step_ms": _STEP_MS}
    figures["router"] = version("vllm-router") if find_spec("vllm_router") else None
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-")))
        # By name: the two roles never import each other.
        await run_module("trainer_agent.demo.policy", folder / "checkpoint", 0)

        async def start(module: str, *args: object, **how: Any) -> Worker:
            return await stack.enter_async_context(worker(module, *args, loop, **how))

        broker = await start("sidecar.bench.broker")
        address = (await broker.answer())["address"]
        numbers = count()

        async def start_engine() -> tuple[str, Worker, str]:
            number = next(numbers)
            settings = GapEngineSettings(
                str(folder / "checkpoint"), GROUP, _SLOTS, address, number, step_ms=_STEP_MS
            )
            engine = await start("sidecar.bench.gap.engine_process", settings.to_json())
            return f"{GROUP}-{number}", engine, (await engine.answer())["url"]

        say(f"starting {_ENGINES} engines")
        engines = await asyncio.gather(*(start_engine() for _ in range(_ENGINES)))
        setting = await _setting(start, stack, address, GROUP, [url for *_, url in engines])
        if not figures["router"]:
            say("vllm-router is not installed: pip install 'wavebus[router]'")
        figures |= await _compare(setting, plan.rounds, say)
        say(f"{_WAVES} waves of {plan.live} streams")
        waves = [
            await setting.wave("client", plan.live, _LIVE_TOKENS, timed=True) for _ in range(_WAVES)
        ]
        figures["live_rss_mb"] = [round(each["rss_mb"], 1) for each in waves]
        figures["live_streams"] = min(each["live"] for each in waves)
        figures["live_growth"] = round(waves[-1]["rss_mb"] / waves[0]["rss_mb"], 3)
        seams_ms: list[float] = []
        for index in range(plan.kills):
            name, victim, _ = engines.pop(0)
            streaming = asyncio.create_task(
                setting.wave("client", 4 * _ENGINES, _TOKENS, timed=True)
            )
            await asyncio.sleep(_KILL_AFTER_S)
            killed_s = time.monotonic()
            await victim.kill()
            engines.append(await start_engine())
            seams = [when_s for engine, when_s in (await streaming)["seams"] if engine == name]
            seams_ms += [(when_s - killed_s) * 1000 for when_s in seams]
            say(f"kill {index + 1}: {len(seams)} answers went on elsewhere")
        if seams_ms:
            figures["kill_answers"] = len(seams_ms)
            figures["kill_p50_ms"] = round(percentile(seams_ms, 50), 1)
            figures["kill_p99_ms"] = round(percentile(seams_ms, 99), 1)
        if plan.vllm:
            say("starting 2 vLLM servers")
            module = "sidecar.bench.vllm_server"
            settings = [_vllm_settings(folder, address, number).to_json() for number in range(2)]
            servers = [await start(module, each, answer_s=_BOOT_S) for each in settings]
            urls = [answer["url"] for answer in [await each.answer() for each in servers]]
            setting = await _setting(start, stack, address, _VLLM_GROUP, urls)
            figures |= await _prefix_hits(setting, urls, plan.rounds)
    return figures


def table(figures: Figures) -> str:
    """The same for people."""
    rows = [("", "client", "other", "ratio", "must")]
    for what, name, way, must in (
        ("ms per token, 1 stream", "token_ms", "bare", "<= 1.05"),
        (f"tokens/s, {_STREAMS} streams", "tokens_per_s", "bare", ">= 0.97"),
        ("client CPU us per token", "cpu_us_per_token", "bare", "<= 2"),
        ("tokens/s, router", "timed_tokens_per_s", "router", ">= 0.97"),
        ("ms to first token, router", "ttft_ms", "router", "<= 1.03"),
    ):
        if f"ratio_{name}" in figures:
            ours, theirs = figures[f"{name}_client"], figures[f"{name}_{way}"]
            rows.append((what, f"{ours}", f"{theirs}", f"{figures[f'ratio_{name}']:.3f}", must))
        else:
            rows.append((what, "", "no vllm-router", "", must))
    if "prefix_hits_client" in figures:
        ours, theirs = figures["prefix_hits_client"], figures.get("prefix_hits_router", "")
        rows.append(("prefix cache hits, router", f"{ours}", f"{theirs}", "", ">= 1"))
    if "kill_p99_ms" in figures:
        rows.append((f"ms after {figures['kills']} kills, p99", f"{figures['kill_p99_ms']}"))
        rows[-1] += ("", "", "<= 2000")
    live, memory = figures["live_streams"], figures["live_rss_mb"]
    rows.append((f"MB with {live} streams", f"{max(memory)}", "", "", "<= 300"))
    rows.append(("the tenth wave's, the first's", f"{memory[-1]}", f"{memory[0]}"))
    rows[-1] += (f"{figures['live_growth']:.3f}", "as much")
    return "\n".join(f"{a:<30}{b:>10}{c:>16}{d:>8}  {e}".rstrip() for a, b, c, d, e in rows)


async def _setting(
    start: Callable[..., Awaitable[Worker]],
    stack: contextlib.AsyncExitStack,
    address: str,
    group: str,
    urls: list[str],
) -> Setting:
    """All ways to ask that there are here."""
    setting = Setting({}, {"client": [], "bare": urls})
    if find_spec("vllm_router") is not None:
        setting.urls["router"] = [await stack.enter_async_context(_router(urls))]
    for way in setting.urls:
        broker = address if way == "client" else "-"
        setting.asking[way] = await start("trainer_agent.bench.rollout", broker, group)
    return setting


@contextlib.asynccontextmanager
async def _router(urls: Sequence[str]) -> AsyncIterator[str]:
    """A vllm-router before these; its URL."""
    port, metrics = free_port(), free_port()
    argv = (
        *(sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
        *("--worker-startup-check-interval", "1", "--worker-urls", *urls),
    )
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(_BOOT_S), aiohttp.ClientSession() as session:
                while not await _serves(session, f"{url}/health"):
                    if process.returncode is not None:
                        log.seek(0)
                        raise BenchFailed(f"vllm-router ended: {log.read()[-2000:].decode()}")
                    await asyncio.sleep(0.1)
            yield url
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _serves(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.ok
    except aiohttp.ClientError:
        return False


async def _compare(setting: Setting, rounds: int, say: Progress) -> Figures:
    """All ways in turn, with one stream and with many."""
    runs = [("client", 1), ("bare", 1), ("client", _STREAMS), ("bare", _STREAMS)]
    timed = [way for way in ("client", "router") if "router" in setting.asking]
    found: dict[str, list[Figures]] = defaultdict(list)
    for number in range(-1, rounds):
        say(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
        turn = 1 if number % 2 else -1  # each goes first as often as the other
        took = {
            **{f"{w}_{n}": await setting.wave(w, n, _TOKENS) for w, n in runs[::turn]},
            **{w: await setting.wave(w, _STREAMS, _TOKENS, timed=True) for w in timed[::turn]},
        }
        for name, each in took.items() if number >= 0 else ():
            each["token_ms"] = each["wall_s"] * 1000 / _TOKENS
            each["tokens_per_s"] = each["tokens"] / each["wall_s"]
            each["cpu_us"] = each["cpu_s"] * 1e6 / each["tokens"]
            each["ttft_ms"] = statistics.median(each["ttft_ms"] or [0.0])
            found[name].append(each)
    figures: Figures = {}
    for name, unit, ours, way, theirs in (
        ("token_ms", "token_ms", "client_1", "bare", "bare_1"),
        ("tokens_per_s", "tokens_per_s", f"client_{_STREAMS}", "bare", f"bare_{_STREAMS}"),
        ("cpu_us_per_token", "cpu_us", f"client_{_STREAMS}", "bare", f"bare_{_STREAMS}"),
        ("timed_tokens_per_s", "tokens_per_s", "client", "router", "router"),
        ("ttft_ms", "ttft_ms", "client", "router", "router"),
    ):
        if theirs in found:
            pairs = [(a[unit], b[unit]) for a, b in zip(found[ours], found[theirs], strict=True)]
            figures |= {
                f"{name}_client": round(statistics.median(a for a, _ in pairs), 2),
                f"{name}_{way}": round(statistics.median(b for _, b in pairs), 2),
                f"ratio_{name}": round(statistics.median(a / b for a, b in pairs), 3),
            }
    return figures


async def _prefix_hits(setting: Setting, urls: list[str], rounds: int) -> Figures:
    """How many prompt tokens two servers of vLLM had in their caches, of sessions by each way."""
    hits: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        for _ in range(rounds):
            for way in setting.asking:
                before = await _hits(session, urls)
                await setting.wave(way, _VLLM_STREAMS, _VLLM_TOKENS, turns=_VLLM_TURNS)
                hits[f"prefix_hits_{way}"] += await _hits(session, urls) - before
    return dict(hits)


async def _hits(session: aiohttp.ClientSession, urls: Sequence[str]) -> int:
    total = 0.0
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        total += sum(float(line.split()[-1]) for line in lines if line.startswith(_HITS))
    return int(total)


def _vllm_settings(folder: Path, address: str, number: int) -> VllmServerSettings:
    argv = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder / "checkpoint"), "--skip-tokenizer-init", "--enforce-eager"),
        *("--dtype=float32", f"--max-num-seqs={_STREAMS}", "--max-model-len=512"),
        *("--block-size=16", "--enable-prefix-caching"),
    )
    env = {name: os.environ.get(name, value) for name, value in VLLM_ON_CPU.items()}
    return VllmServerSettings(argv, env, address, _VLLM_GROUP, name=f"server-{number}")
