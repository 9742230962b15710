"""The trainer of one case of :mod:`tests.gpu.transfer`, as a process: does it, and writes what it
saw as one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from bus.errors import WavebusError
from tests.gpu import one_gpu
from tests.gpu.serving import TOKENS, command, descendants, load_adapter, tokens_of
from tests.support.adapters import make_adapter
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.messages import SleepLevel

WARM_UP = 2
STAGED = 5
CHOICES = [
    *("update", "staged", "not-staged", "adapter", "refused"),
    *("remade", "asleep-1", "asleep-2", "killed"),
]
ADAPTER = "policy-lora"


def used_mb() -> dict[str, float]:
    """Of every GPU that is to be seen, whoever uses it."""
    found = {}
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found[f"gpu{index}"] = round((total - free) / 1e6, 1)
    return found


def used_by_process_mb() -> dict[str, float]:
    """What nvidia-smi tells of each process; nothing, where it can't (containers)."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (line.split(",") for line in answer.stdout.splitlines())
    return {row[0].strip(): float(row[1]) for row in rows if row[1].strip().isdigit()}


async def update(agent: TrainerAgent, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Twice: the first one also opens the transport."""
    first_s = await _timed(agent, weights)
    again_s = await _timed(agent, weights)
    report = agent.last_update
    assert report is not None
    return {
        "engines": report.engines,
        "mb": round(report.size_bytes / 1e6, 1),
        "chunks": report.chunks,
        "verified": report.verified,
        "first_ms": round(first_s * 1000, 1),
        "again_ms": round(again_s * 1000, 1),
        "paused_ms": round(report.paused_ms, 1),
        "gb_per_s": round(report.size_bytes / 1e6 / report.paused_ms, 2),
    }


async def _timed(agent: TrainerAgent, weights: dict[str, torch.Tensor], **how: Any) -> float:
    since_s = time.perf_counter()
    await agent.update_weights(weights, **{"how": "paused", **how})
    return time.perf_counter() - since_s


async def staged(
    agent: TrainerAgent, weights: dict[str, torch.Tensor], endpoints: list[str], tokens: int
) -> dict[str, Any]:
    """Some in the middle of a request to each engine: all its tokens come, and nobody is paused.
    What a paused update takes, beside it."""
    await agent.update_weights(weights, how="paused")  # the transport is open, and the plan proven
    paused_s = await _timed(agent, weights)
    requests = [asyncio.create_task(asyncio.to_thread(tokens_of, e, tokens)) for e in endpoints]
    await running(agent, requests)
    took, commits, why = [], [], set()
    report = agent.last_update
    for turn in range(STAGED):
        took.append(await _timed(agent, weights, how="auto", keep_staging=turn + 1 < STAGED))
        report = agent.last_update
        assert report is not None
        commits.append(report.commit_ms)
        why.add(report.why_paused)
    came = [len(await request) for request in requests]
    assert report is not None
    failure = "; ".join(sorted(filter(None, why)))
    if any(count != tokens for count in came):
        failure = f"{came} of {tokens} tokens came"
    return {
        "mb": round(report.size_bytes / 1e6, 1),
        "staging_mb": round(report.staging_bytes / 1e6, 1),
        "paused_ms": round(paused_s * 1000, 1),
        "staged_ms": round(statistics.median(took) * 1000, 1),
        "commit_ms": round(statistics.median(commits), 1),
        "tokens": came,
        **({"failure": failure} if failure else {}),
    }


async def running(agent: TrainerAgent, requests: Sequence[asyncio.Task[tuple[int, ...]]]) -> None:
    """Until every engine, of which each has one of these requests, says that it decodes."""
    while not all(e.in_flight for e in await agent.wait_for_engines(len(requests))):
        ended = [request for request in requests if request.done()]
        assert not ended, f"{len(ended)} have ended before all were seen: --tokens for longer ones"
        await asyncio.sleep(0.05)


async def not_staged(agent: TrainerAgent, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What can't be staged is loaded in a pause, and says why; and is refused, if asked for."""
    took_s = await _timed(agent, weights, how="auto")
    report = agent.last_update
    assert report is not None
    told = {
        "mb": round(report.size_bytes / 1e6, 1),
        "how": report.how,
        "why_paused": report.why_paused,
        "took_ms": round(took_s * 1000, 1),
    }
    try:
        await agent.update_weights(weights, how="staged")
    except WavebusError as error:
        told["error"] = _told(error)
    else:
        told["failure"] = "it was staged"
    if (report.how, bool(report.why_paused)) != ("paused", True):
        told["failure"] = "it says nothing of a pause"
    return told


async def adapter(
    agent: TrainerAgent, weights: dict[str, torch.Tensor], endpoint: str, device: str
) -> dict[str, Any]:
    """Two adapters of one name, which vLLM beside them loads from folders: equal tokens, which are
    not those of the model, nor of the other adapter."""
    base = {name: tensor.cpu().float() for name, tensor in weights.items()}
    dtype = next(iter(weights.values())).dtype
    seen = [tokens_of(endpoint, TOKENS)]
    took, told = [], {}
    for seed in (1, 2):
        made = make_adapter(base, seed)
        rounded = {name: tensor.to(dtype) for name, tensor in made.tensors.items()}
        since_s = time.perf_counter()
        sent = {name: tensor.to(device) for name, tensor in rounded.items()}
        await agent.update_adapter(ADAPTER, sent, config=made.config)
        took.append(round((time.perf_counter() - since_s) * 1000, 1))
        with tempfile.TemporaryDirectory() as parent:
            saved = replace(made, tensors=rounded).save(Path(parent) / "adapter")
            await asyncio.to_thread(load_adapter, endpoint, f"file-{seed}", saved)
            expected = tokens_of(endpoint, TOKENS, adapter=f"file-{seed}")
        if tokens_of(endpoint, TOKENS, adapter=ADAPTER) != expected:
            told["failure"] = f"adapter {seed}: other tokens than from its folder"
        if expected in seen:
            told["failure"] = f"adapter {seed} changes no token"
        seen.append(expected)
    report = agent.last_update
    assert report is not None
    size_mb = round(report.size_bytes / 1e6, 3)
    return {"mb": size_mb, "chunks": report.chunks, "took_ms": took, **told}


async def refused(agent: TrainerAgent, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """It must be, and in a moment."""
    since_s = time.perf_counter()
    try:
        await agent.update_weights(weights, how="paused")
    except WavebusError as error:
        return {"error": _told(error), "after_s": round(time.perf_counter() - since_s, 2)}
    raise AssertionError("it was not refused")


async def remade(
    agent: TrainerAgent, weights: dict[str, torch.Tensor], times: int
) -> dict[str, Any]:
    """The transport is made anew for every update; GPU memory before and after."""
    for _ in range(WARM_UP):
        await agent.close_transport()
        await agent.update_weights(weights, how="paused")
    before, before_each = used_mb(), used_by_process_mb()
    took: list[float] = []
    for _ in range(times):
        await agent.close_transport()
        took.append(await _timed(agent, weights) * 1000)
    after, after_each = used_mb(), used_by_process_mb()
    growth = {name: round(after[name] - before[name], 1) for name in before}
    each = {pid: round(mb - before_each.get(pid, mb), 1) for pid, mb in after_each.items()}
    # Engines of later cases may start meanwhile: where processes are seen, theirs doesn't count.
    grown = [name for name, mb in (each or growth).items() if mb > 64]
    return {
        "times": times,
        "each_ms": round(statistics.median(took), 1),
        "growth_mb": growth,
        "growth_by_process_mb": each,
        "new_processes_mb": {p: mb for p, mb in after_each.items() if p not in before_each},
        **({"failure": f"memory grew: {', '.join(grown)}"} if grown else {}),
    }


async def asleep(
    agent: TrainerAgent,
    weights: dict[str, torch.Tensor],
    level: SleepLevel,
    endpoint: str,
    tokens: int,
) -> dict[str, Any]:
    """An update of an engine that sleeps, in the middle of a request; what it gives back."""
    await agent.update_weights(weights, how="paused")  # the transport is open, and CUDA warm
    request = asyncio.create_task(asyncio.to_thread(tokens_of, endpoint, tokens))
    await running(agent, [request])
    memory, marks = [used_mb()["gpu0"]], [time.perf_counter()]

    def mark() -> None:
        memory.append(used_mb()["gpu0"])
        marks.append(time.perf_counter())

    async with agent.asleep(level=level):
        mark()
        await agent.update_weights(weights, how="paused")
        mark()
    mark()
    came = len(await request)
    took = [round((b - a) * 1000, 1) for a, b in itertools.pairwise(marks)]
    return {
        "given_back_mb": round(memory[0] - memory[1], 1),
        "with_weights_mb": round(memory[0] - memory[2], 1),
        "afterwards_mb": round(memory[0] - memory[3], 1),
        "pause_and_sleep_ms": took[0],
        "wake_and_update_ms": took[1],
        "wake_cache_ms": took[2],
        "tokens": came,
        **({} if came == tokens else {"failure": f"{came} of {tokens} tokens came"}),
    }


async def killed(
    agent: TrainerAgent, weights: dict[str, torch.Tensor], sidecar: int
) -> dict[str, Any]:
    """SIGKILL to the engine's core at the third chunk: how long until the trainer knows, and until
    its GPU is free again."""
    sender = agent._transport.sender
    victims = [pid for pid in descendants(sidecar) if "EngineCore" in command(pid)]
    assert victims, "there is no process of that name"
    transfer, at_s = sender.transfer, 0.0

    def kill_and_transfer(seq: int) -> None:
        nonlocal at_s
        if seq == 2:
            at_s = time.monotonic()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        transfer(seq)

    sender.transfer = kill_and_transfer  # type: ignore[method-assign]
    try:
        await agent.update_weights(weights, how="paused")
    except WavebusError as error:
        known_s = time.monotonic() - at_s
        if torch.cuda.is_available():
            await asyncio.to_thread(torch.cuda.synchronize)
        free_s = time.monotonic() - at_s
        return {
            "error": _told(error),
            "known_after_s": round(known_s, 2),
            "gpu_free_after_s": round(free_s, 2),
        }
    raise AssertionError("the update went through without the engine")


def _told(error: WavebusError) -> str:
    return f"{type(error).__name__}: {error}"[:400]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=CHOICES, required=True)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--unpacked", action="store_true")
    parser.add_argument("--chunk-bytes", type=int, default=64 << 20)
    parser.add_argument("--device", required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--sidecar", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one-gpu", action="store_true")
    options = parser.parse_args()
    if options.one_gpu:
        one_gpu.apart()
    if options.device != "cpu":
        torch.cuda.set_device(options.device)
    weights = load_file(options.weights, options.device)
    async with TrainerAgent(
        options.broker,
        group=options.group,
        backend=options.backend,
        packed=not options.unpacked,
        chunk_bytes=options.chunk_bytes,
        timeout_s=60.0,
    ) as agent:
        engines = await agent.wait_for_engines(options.engines, timeout_s=20)
        match options.what:
            case "update":
                found = await update(agent, weights)
            case "staged":
                found = await staged(agent, weights, [e.endpoint for e in engines], options.tokens)
            case "not-staged":
                found = await not_staged(agent, weights)
            case "adapter":
                found = await adapter(agent, weights, engines[0].endpoint, options.device)
            case "refused":
                found = await refused(agent, weights)
            case "remade":
                found = await remade(agent, weights, options.times)
            case "asleep-1":
                found = await asleep(agent, weights, 1, engines[0].endpoint, options.tokens)
            case "asleep-2":
                found = await asleep(agent, weights, 2, engines[0].endpoint, options.tokens)
            case _:
                found = await killed(agent, weights, options.sidecar)
    options.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
