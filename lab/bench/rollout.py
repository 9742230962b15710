"""``bench rollout``: what the rollout client costs, compared with sending without it.

Four ways to send requests alternate in one run. Each has a process of its own, and all use the
same engines, whose steps have a fixed length:

- **client**: the rollout client.
- **bare**: aiohttp alone, which streams and parses in the same way, and takes engines in turn.
- **gateway**: aiohttp through ``wavebus gateway``.
- **router**: aiohttp through vllm-router with ``consistent_hash``, if that is installed.

Then many streams are live at once, and engines get SIGKILL while the client streams from them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from lab.bench.fleet import on_cpu, server_argv
from lab.bench.harness import BenchFailed, in_turn, kill, median, medians, say, title
from lab.bench.streams import percentile
from lab.network import Network, PolicyConfig, save_network
from sidecar._supervision.launch import free_port

if TYPE_CHECKING:
    from lab.bench.harness import Bench, Worker
    from lab.bench.plans import RolloutPlan

_GROUP: Final = "policy"
_ENGINES: Final = 4
_STEP_MS: Final = 20.0
_STREAMS: Final = 64
_TOKENS: Final = 100
# The time to the first token scatters by more than the ways differ, and short answers are enough.
_FIRST_TOKENS: Final = 10
_FIRST_ROUNDS: Final = 12  # for each round of the other comparisons
_WAVES: Final = 5
_LIVE_TOKENS: Final = 400  # long, so that no stream ends before all have begun
_BOOT_S: Final = 400.0
_KILL_AFTER_S: Final = 0.5
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
# What is compared: its name, its unit, and the rounds of the two ways.
_PAIRS: Final = (
    ("token_ms", "token_ms", "client_1", "bare_1"),
    ("tokens_per_s", "tokens_per_s", "client", "bare"),
    ("cpu_us_per_token", "cpu_us", "client", "bare"),
    ("timed_tokens_per_s", "tokens_per_s", "client_timed", "router"),
    ("ttft_ms", "ttft_ms", "client_first", "router_first"),
    ("front_token_ms", "token_ms", "gateway_1", "bare_1"),
    ("front_tokens_per_s", "tokens_per_s", "gateway", "bare"),
    ("front_cpu_us_per_token", "front_cpu_us", "gateway", "router"),
)


@dataclass(frozen=True, slots=True)
class Front:
    """A server between clients and engines.

    Attributes:
        url: its URL.
        pid: its process.
    """

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Returns the CPU time of the process and its children so far, in seconds."""
        return _cpu_s(self.pid)

    def peak_mb(self) -> float:
        """Returns the most memory that the process has had at once, in MB."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
        return round(int(peak) * 1024 / 1e6, 1)


class RolloutBench:
    """Starts the engines and the processes that send requests, and measures them.

    Attributes:
        ways: by way of sending, the process that sends requests in that way.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._numbers = count()
        self._fronts: dict[str, Front] = {}
        self.ways: dict[str, Worker] = {}

    async def boot(self) -> list[tuple[str, Worker, str]]:
        """Starts the broker and the engines; returns each engine's name, process and URL."""
        folder = self._bench.folder()
        save_network(Network(PolicyConfig()), folder)
        self._checkpoint = str(folder)
        self._address = await self._bench.broker()
        return list(await asyncio.gather(*(self.start_engine() for _ in range(_ENGINES))))

    async def start_engine(self) -> tuple[str, Worker, str]:
        """Starts one more engine; returns its name, its process and its URL.

        The engine has more slots than its share of the streams, because sessions are spread
        unevenly: an engine may get 1.25 times the mean.
        """
        number = next(self._numbers)
        engine, said = await self._bench.start(
            "embedded_engine",
            name=f"engine-{number}",
            folder=self._checkpoint,
            group=_GROUP,
            broker=self._address,
            rank=number,
            max_num_seqs=384,
            step_ms=_STEP_MS,
        )
        return f"{_GROUP}-{number}", engine, said["url"]

    async def start_asking(self, group: str, urls: list[str]) -> None:
        """Starts a process for each way of sending requests that is possible here."""
        self._urls = {"client": list[str](), "bare": urls}
        self._fronts = {"gateway": Front(*await self._bench.gateway(self._address, group))}
        if find_spec("vllm_router") is not None:
            self._fronts["router"] = await router(self._bench, urls)
        self._urls |= {way: [front.url] for way, front in self._fronts.items()}
        for way in self._urls:
            broker = self._address if way == "client" else ""
            self.ways[way], _ = await self._bench.start(
                "rollout_asking", name=way, broker=broker, group=group
            )

    async def wave(self, way: str, streams: int, tokens: int, **more: Any) -> dict[str, Any]:
        """Sends a :class:`lab.bench.programs.rollout_asking.Wave`; returns its times."""
        name = f"{way}-{next(self._numbers)}"
        wave = {"name": name, "streams": streams, "tokens": tokens, "urls": self._urls[way], **more}
        front = self._fronts.get(way)
        before_s = front.cpu_s() if front else 0.0
        took = dict(await self.ways[way].ask("run", wave=wave))
        return {**took, "front_cpu_s": front.cpu_s() - before_s if front else 0.0}

    async def compare(self, rounds: int) -> dict[str, Any]:
        """Measures all ways in turn, with one stream and with many; returns medians and ratios."""

        async def one(
            name: str, streams: int, *, timed: bool, tokens: int = _TOKENS
        ) -> dict[str, Any]:
            took = await self.wave(name.split("_", maxsplit=1)[0], streams, tokens, timed=timed)
            if took["tokens"] != streams * tokens:
                raise BenchFailed(f"{name}: {took['tokens']} tokens")
            return {
                "token_ms": took["wall_s"] * 1000 / tokens,
                "tokens_per_s": took["tokens"] / took["wall_s"],
                "cpu_us": took["cpu_s"] * 1e6 / took["tokens"],
                "front_cpu_us": took["front_cpu_s"] * 1e6 / took["tokens"],
                "ttft_ms": median(took["ttft_ms"] or [0.0]),
            }

        always = ("client", "bare", "gateway")
        ways = {f"{way}_1": partial(one, f"{way}_1", 1, timed=False) for way in always}
        ways |= {way: partial(one, way, _STREAMS, timed=False) for way in always}
        first: dict[str, Any] = {}
        if "router" in self.ways:
            for way in ("client_timed", "router"):
                ways[way] = partial(one, way, _STREAMS, timed=True)
            for way in ("client_first", "router_first"):
                first[way] = partial(one, way, _STREAMS, timed=True, tokens=_FIRST_TOKENS)

        def tell(number: int, way: str, _: object) -> None:
            if way == "client":
                say(f"{title(number)} of {rounds}")

        found = await in_turn(ways, rounds, swing=True, on_round=tell)
        if first:
            say(f"{_FIRST_ROUNDS * rounds} rounds of the time to the first token")
            found |= await in_turn(first, _FIRST_ROUNDS * rounds, swing=True)
        figures: dict[str, Any] = {}
        for name, unit, ours, theirs in _PAIRS:
            if theirs in found:
                pairs = list(zip(found[ours], found[theirs], strict=True))
                for way in (ours, theirs):
                    figures[f"{name}_{way.split('_')[0]}"] = round(medians(found[way])[unit], 2)
                figures[f"ratio_{name}"] = median(a[unit] / b[unit] for a, b in pairs)
        return figures

    async def live(self, streams: int) -> dict[str, Any]:
        """Measures the client's memory in waves of ``streams`` open streams each.

        One more wave goes through the gateway, whose memory counts.
        """
        say(f"{_WAVES} waves of {streams} streams")
        more = {"timed": True, "until_live": True}
        wave = partial(self.wave, "client", streams, _LIVE_TOKENS, **more)
        waves = (await in_turn({"wave": wave}, _WAVES))["wave"]
        memory = [round(each["rss_mb"], 1) for each in waves]
        waves.append(await self.wave("gateway", streams, _LIVE_TOKENS, **more))
        return {
            "live_streams": min(each["live"] for each in waves),
            "live_gateway_peak_mb": self._fronts["gateway"].peak_mb(),
            "live_rss_mb": memory,
            "ratio_live_rss": round(memory[-1] / memory[0], 3),
        }

    async def kill(self, engines: list[tuple[str, Worker, str]], kills: int) -> dict[str, Any]:
        """Kills engines while the client streams, and measures how long answers are interrupted.

        The time is from the engine's SIGKILL to the answer's next token, which another engine
        sends. A new engine replaces each that is killed.
        """
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
            say(f"kill {number + 1} of {kills}: {len(seams)} answers went on elsewhere")
        if not took_ms:
            return {}
        p50, p99 = (round(percentile(took_ms, percent), 1) for percent in (50, 99))
        return {"kill_answers": len(took_ms), "kill_p50_ms": p50, "kill_p99_ms": p99}

    async def prefix_hits(self, rounds: int) -> dict[str, Any]:
        """Counts how many prompt tokens vLLM servers find in their prefix caches, for each way."""
        say("starting 2 vLLM servers")
        argv = server_argv(
            *("--model", self._checkpoint, "--enforce-eager", "--dtype=float32"),
            *(f"--max-num-seqs={_STREAMS}", "--max-model-len=512", "--block-size=32"),
            "--enable-prefix-caching",
        )
        urls: list[str] = []
        for name in ("server-0", "server-1"):
            _, said = await self._bench.start(
                "vllm_server",
                answer_s=_BOOT_S,
                grace_s=40.0,
                server=name,
                argv=argv,
                variables=on_cpu(),
                broker=self._address,
                group="vllm",
            )
            urls.append(said["url"])
        await self.start_asking("vllm", urls)
        hits: Counter[str] = Counter()
        async with aiohttp.ClientSession() as session:
            for _ in range(rounds):
                for way in self.ways:
                    before = await cache_hits(session, urls)
                    await self.wave(way, 16, 48, turns=4)
                    hits[f"prefix_hits_{way}"] += await cache_hits(session, urls) - before
        return dict(hits)


async def measure(bench: Bench, plan: RolloutPlan) -> dict[str, Any]:
    """Measures all ways; returns the fields of the JSON output.

    Raises:
        BenchFailed: a process died, or a request failed.
    """
    figures: dict[str, Any] = {**asdict(plan), "engines": _ENGINES, "step_ms": _STEP_MS}
    figures["router"] = version("vllm-router") if find_spec("vllm_router") else None
    if not figures["router"]:
        say("not compared with vllm-router, which is not installed: pip install 'wavebus[router]'")
    running = RolloutBench(bench)
    engines = await running.boot()
    await running.start_asking(_GROUP, [url for *_, url in engines])
    figures |= await running.compare(plan.rounds)
    figures |= await running.live(plan.live)
    figures |= await running.kill(engines, plan.kills)
    figures |= await running.prefix_hits(plan.rounds) if plan.vllm else {}
    return figures


async def router(bench: Bench, urls: list[str]) -> Front:
    """Starts a vllm-router in front of some engines."""
    port, metrics = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
        *("--worker-startup-check-interval", "1", "--worker-urls", *urls),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    bench.push_async_callback(kill, process)
    async with asyncio.timeout(_BOOT_S), aiohttp.ClientSession() as session:
        while not await _serves(session, url):
            if process.returncode is not None:
                raise BenchFailed(f"vllm-router ended with code {process.returncode}")
            await asyncio.sleep(0.1)
    return Front(url, process.pid)


def _cpu_s(pid: int) -> float:
    """Returns the CPU time of a process and those that it has started, in seconds."""
    folder = Path(f"/proc/{pid}")
    # After the name, which may have spaces: the times are fields 14 and 15 of all.
    fields = (folder / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
    own_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    children = (each.read_text(encoding="ascii").split() for each in folder.glob("task/*/children"))
    return own_s + sum(_cpu_s(int(child)) for each in children for child in each)


async def _serves(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.ok
    except aiohttp.ClientError:
        return False


async def cache_hits(session: aiohttp.ClientSession, urls: list[str]) -> int:
    """Returns how many prompt tokens the servers have found in their caches so far."""
    total = 0.0
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        hits = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
        total += sum(float(line.split()[-1]) for line in hits)
    return int(total)
