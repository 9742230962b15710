"""Pause, update and resume of real MoE ranks under load, again and again.

    python -m tests.gpu.dp_rounds --dp-size 2 --coordinator bus --rounds 50

Starts a broker and one supervised DP group of vLLM servers (external load balancing,
expert parallel, random weights), keeps requests running on every rank, and meanwhile
pauses, updates and resumes over the bus. Each update sends other weights than the one before, and
each rank must answer as it has answered with those of the same set before the rounds (with the set
that it was booted with: before any update). Nothing may hang, and every request must end
with exactly the tokens that it asked for. Then a rank's engine is killed, and the DP
group must come back as one. Prints one JSON object; exits with 1 if anything is wrong.

On a host without GPUs it runs as well, on vLLM's CPU build (``--cpu``), without expert
parallelism, which that build can't do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import aiohttp
import torch

from lab.demo.processes import VLLM_ON_CPU
from tests.gpu.checkpoints import make, moe_config
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKENS: Final = 200
STREAMS: Final = 4  # per rank
BOOT_S: Final = 420.0
SETS: Final = 3  # of weights, which take turns
PROBES: Final = tuple((3 + number, 17, 5 * number + 1) for number in range(8))
PROBE_TOKENS: Final = 6
# Of a probe's tokens, some may be others when the batch is another; those of another set are hardly
# ever the same.
ALIKE: Final = 0.6


@dataclass
class Load:
    """Requests without end on every rank, and what became of them."""

    done: int = 0
    short: int = 0
    failed: int = 0
    running: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stop: bool = False

    async def stream(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        """One request after another, until told to stop; the last one ends whole."""
        body = {
            "token_ids": [3 + seed % 50, 7, 11, 5],
            "sampling_params": {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
        }
        while not self.stop:
            self.running += 1
            try:
                async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                    answer = await response.json()
                    made = len(answer["choices"][0]["token_ids"])
            except (aiohttp.ClientError, TimeoutError, KeyError) as error:
                self.failed += 1
                self.errors.append(f"{type(error).__name__}: {error}"[:200])
                return
            finally:
                self.running -= 1
            self.done += 1
            self.short += made != TOKENS


def model(folder: Path, *, small: bool) -> list[dict[str, torch.Tensor]]:
    """A random Qwen3 MoE, saved in ``folder``; its weights, and other sets of them."""
    config = moe_config(small=small, vocab_size=1024)
    made = [make(config, folder / str(number), 7 + number, "cpu") for number in range(SETS)]
    return [_per_expert(dict(each.state_dict()), config.num_experts) for each in made]


Answers: TypeAlias = list[int]


async def _answers(session: aiohttp.ClientSession, url: str) -> Answers:
    """The tokens of all probes, one after the other."""

    async def ask(prompt: tuple[int, ...]) -> list[int]:
        sampling = {"max_tokens": PROBE_TOKENS, "temperature": 0.0, "ignore_eos": True}
        body = {"token_ids": list(prompt), "sampling_params": sampling}
        async with session.post(f"{url}/inference/v1/generate", json=body) as response:
            tokens: list[int] = (await response.json())["choices"][0]["token_ids"]
        return tokens

    return [token for prompt in PROBES for token in await ask(prompt)]


def _alike(one: Answers, other: Answers) -> float:
    """Which part of the tokens is the same."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


async def _known_answers(
    agent: TrainerAgent,
    session: aiohttp.ClientSession,
    urls: list[str],
    sets: list[dict[str, torch.Tensor]],
) -> list[Answers]:
    """Of each set, without any load: the first one is what the engines were booted with.

    Raises:
        SystemExit: ranks answer differently, or two sets can't be told apart.
    """
    known: list[Answers] = []
    for number, weights in enumerate(sets):
        if number:
            await agent.update_weights(weights, label=f"set {number}")
        first, *others = [await _answers(session, url) for url in urls]
        if any(_alike(first, other) < ALIKE for other in others):
            raise SystemExit(f"set {number}: the ranks answer differently")
        if any(_alike(first, other) >= ALIKE for other in known):
            raise SystemExit(f"set {number}: answers are those of another set")
        known.append(first)
    return known


def _per_expert(state: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Weights under the names of a checkpoint, where each expert has its own."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for index in range(experts):
                gate, up = tensor[index].chunk(2)
                weights[f"{prefix}{index}.gate_proj.weight"] = gate.contiguous()
                weights[f"{prefix}{index}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for index in range(experts):
                weights[f"{prefix}{index}.down_proj.weight"] = tensor[index].contiguous()
        else:
            weights[name] = tensor
    return weights


@contextlib.asynccontextmanager
async def bus(options: argparse.Namespace, folder: Path, logs: Path) -> AsyncIterator[str]:
    """A broker and the DP group, for the length of a block; the broker's address."""
    wavebus = [sys.executable, "-m", "bus._cli.main"]
    broker = subprocess.Popen(  # noqa: ASYNC220 - our own command, quickly started
        [*wavebus, "broker", "--listen", "tcp://127.0.0.1:*", "--log-format", "json"],
        stdout=subprocess.PIPE,
        stderr=_log(logs / "broker.log"),
        text=True,
    )
    assert broker.stdout is not None
    address = broker.stdout.readline().strip()
    server = [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--skip-tokenizer-init", "--enforce-eager", "--max-num-seqs=32"),
        "--max-model-len=1024",
        *(["--dtype=float32"] if options.cpu else ["--enable-expert-parallel"]),
        *([] if options.cpu else ["--gpu-memory-utilization=0.3"]),
        *(["--dp-sync-interval", str(options.sync_interval)] if options.sync_interval else []),
    ]
    ranks = subprocess.Popen(  # noqa: ASYNC220 - our own command, quickly started
        [
            *(*wavebus, "sidecar", "--broker", address, "--dp-group", "moe"),
            *("--dp-size", str(options.dp_size), "--dp-coordinator", options.coordinator),
            *("--log-format", "json", "--", sys.executable, *server),
        ],
        stdout=subprocess.DEVNULL,
        stderr=_log(logs / "ranks.log"),
        env={**os.environ, **(VLLM_ON_CPU if options.cpu else {})},
    )
    try:
        yield address
    finally:
        for process in (ranks, broker):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 90)
            process.kill()
            process.wait()


def _log(path: Path) -> IO[bytes]:
    return path.open("wb")


async def measure(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """The rounds, and the restart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = model(folder, small=options.cpu)
        size = sum(t.numel() * t.element_size() for t in sets[0].values())
        began_s = time.monotonic()
        async with (
            bus(options, folder / "0", logs) as address,
            TrainerAgent(address, timeout_s=120.0) as agent,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session,
        ):
            views = await agent.wait_for_engines(options.dp_size, timeout_s=BOOT_S)
            found: dict[str, Any] = {
                "software": views[0].software,
                "gpus": torch.cuda.device_count(),
                "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
                "torch": version("torch"),
                "dp_size": options.dp_size,
                "coordinator": options.coordinator,
                "weights_mb": round(size / 1e6, 1),
                "boot_s": round(time.monotonic() - began_s, 1),
            }
            found |= await _rounds(options, agent, session, [v.endpoint for v in views], sets)
            if options.pauses:
                found |= await _pauses(options, agent, session, [v.endpoint for v in views])
            if options.kill:
                found |= await _restart(options, agent, session, views[0].pid, sets[0])
            return found


async def _rounds(
    options: argparse.Namespace,
    agent: TrainerAgent,
    session: aiohttp.ClientSession,
    urls: list[str],
    sets: list[dict[str, torch.Tensor]],
) -> dict[str, Any]:
    known = await _known_answers(agent, session, urls, sets)
    load = Load()
    streams = [
        asyncio.create_task(load.stream(session, url, seed))
        for seed, url in enumerate(urls * STREAMS)
    ]
    pauses: list[float] = []
    direct: list[float] = []
    updates: list[float] = []
    interrupted = wrong = 0
    since_s = time.monotonic()
    for number in range(options.rounds):
        if number % 3 == 1:
            direct.append(await _pause_directly(session, urls))
        elif number % 3:
            begun_s = time.perf_counter()
            async with agent.paused(mode="keep") as ack:
                pauses.append((time.perf_counter() - begun_s) * 1000)
                interrupted += ack.in_flight > 0
        else:
            turn = len(updates) % SETS  # never those of the update before
            await agent.update_weights(sets[turn], label=f"round {number}, set {turn}")
            report = agent.last_update
            assert report is not None
            updates.append(report.paused_ms)
            interrupted += report.interrupted > 0
            answers = [await _answers(session, url) for url in urls]
            alike = [_alike(each, known[turn]) for each in answers]
            wrong += min(alike) < ALIKE
            _say(round=number, alike=alike, paused_ms=round(updates[-1], 1))
        await asyncio.sleep(0.05 * (number % 5))  # so that rounds meet all moments of a wave
    load.stop = True
    await asyncio.gather(*streams)
    status = (await agent.status()).groups[0].dp_groups[0]
    return {
        "rounds": options.rounds,
        "updates": len(updates),
        "updates_wrong": wrong,
        "interrupted": interrupted,
        "requests": load.done,
        "requests_short": load.short,
        "requests_failed": load.failed,
        "errors": load.errors[:3],
        "pause_direct_ms_p50": round(statistics.median(direct), 1),
        "pause_direct_ms_max": round(max(direct), 1),
        "pause_ms_p50": round(statistics.median(pauses), 1),
        "pause_ms_max": round(max(pauses), 1),
        "update_paused_ms_p50": round(statistics.median(updates), 1),
        "update_paused_ms_max": round(max(updates), 1),
        "rounds_s": round(time.monotonic() - since_s, 1),
        "wave": status.wave,
        "health": status.health,
        "coordinator": status.coordinator,
    }


async def _pauses(
    options: argparse.Namespace,
    agent: TrainerAgent,
    session: aiohttp.ClientSession,
    urls: list[str],
) -> dict[str, Any]:
    """Pauses alone, through the bus and direct in turn, under load: what the bus adds."""
    load = Load()
    streams = [
        asyncio.create_task(load.stream(session, url, seed))
        for seed, url in enumerate(urls * STREAMS)
    ]
    direct: list[float] = []
    through: list[float] = []
    for _ in range(options.pauses):
        direct.append(await _pause_directly(session, urls))
        await asyncio.sleep(0.02)
        begun_s = time.perf_counter()
        async with agent.paused(mode="keep"):
            through.append((time.perf_counter() - begun_s) * 1000)
        await asyncio.sleep(0.02)
    load.stop = True
    await asyncio.gather(*streams)
    more = statistics.median(through) - statistics.median(direct)
    return {
        "pauses": options.pauses,
        "loaded_pause_direct_ms": round(statistics.median(direct), 2),
        "loaded_pause_bus_ms": round(statistics.median(through), 2),
        "loaded_pause_more_ms": round(more, 2),
        "loaded_short": load.short + load.failed,
        "loaded_requests": load.done,
    }


async def _pause_directly(session: aiohttp.ClientSession, urls: list[str]) -> float:
    """What peers do: concurrent posts to the engines; how long the pause took, in ms."""

    async def post(url: str, params: dict[str, str] | None = None) -> None:
        async with session.post(url, params=params) as response:
            response.raise_for_status()

    begun_s = time.perf_counter()
    how = {"mode": "keep", "clear_cache": "true"}
    await asyncio.gather(*(post(f"{url}/pause", how) for url in urls))
    took_ms = (time.perf_counter() - begun_s) * 1000
    await asyncio.gather(*(post(f"{url}/resume") for url in urls))
    return took_ms


async def _restart(
    options: argparse.Namespace,
    agent: TrainerAgent,
    session: aiohttp.ClientSession,
    pid: int,
    weights: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """SIGKILL to one rank's sidecar, and its engine with it: all come back, as one.

    They have the checkpoint's weights then, and take no request before an update.
    """
    since_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while True:  # until the broker has missed it
        status = (await agent.status()).groups[0].dp_groups[0]
        if status.state == "down":
            break
        await asyncio.sleep(0.2)
    down_s = time.monotonic() - since_s
    _say(killed_down_s=round(down_s, 1))
    views = await agent.wait_for_engines(options.dp_size, timeout_s=BOOT_S)
    up_s = time.monotonic() - since_s
    await agent.update_weights(weights, label="after the restart")
    load = Load(stop=False)
    streams = [
        asyncio.create_task(load.stream(session, view.endpoint, n)) for n, view in enumerate(views)
    ]
    async with agent.paused(mode="keep"):
        pass
    load.stop = True
    await asyncio.gather(*streams)
    return {
        "killed_down_s": round(down_s, 1),
        "killed_up_s": round(up_s, 1),
        "requests_after": load.done,
        "failed_after": load.failed + load.short,
        "diagnosis": status.diagnosis,
    }


def _say(**found: object) -> None:
    """Tell how far this is; it stays when a time limit ends the run."""
    print(json.dumps(found), file=sys.stderr, flush=True)  # noqa: T201 - what it is for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--coordinator", choices=["vllm", "bus"], default="bus")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kill", action="store_true", help="kill a rank at the end")
    parser.add_argument("--pauses", type=int, default=0, help="then so many of each kind")
    parser.add_argument("--sync-interval", type=int, default=0, help="vLLM's --dp-sync-interval")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"))
    options = parser.parse_args()
    logs = options.logs / f"dp{options.dp_size}-{options.coordinator}"
    logs.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(measure(options, logs))
    print(json.dumps(found))  # noqa: T201 - what it is for
    counts = ("requests_short", "requests_failed", "updates_wrong", "failed_after")
    bad = sum(found.get(name, 0) for name in counts)
    return 1 if bad or found["health"] not in ("ok", "unknown") else 0


if __name__ == "__main__":
    sys.exit(main())
