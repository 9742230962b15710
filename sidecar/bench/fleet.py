"""A trainer and several vLLM servers of one model, with the raw broadcast beside them.

The trainer is on one GPU, the servers side by side on another, each with weights of its own; one at
a time has requests. If all ways to send are those of one GPU, all are on it. ``native`` is vLLM
alone; the others have a sidecar, and each is alone in a group of its name. Instead of a server
there may be the ranks of a DP group, in lockstep over a mixture of experts: then rank ``r`` of each
is on GPU ``r``, and the trainer on the first. On a CPU all are small, and share it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from sidecar.bench.harness import VLLM_ON_CPU, say
from sidecar.bench.streams import PROMPT_TOKENS, greedy, prompt_of
from sidecar.supervision.launch import free_port
from sidecar.supervision.ranks import rank_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from sidecar.bench.harness import Bench, Worker
    from sidecar.bench.plans import Device, EnginesPlan

NATIVE: Final = "native"
_HOST: Final = "127.0.0.1"
_SLOW: Final[dict[str, Any]] = {"answer_s": 400.0}  # booting, and meeting for the first time
_GRACE_S: Final = 40.0
_MAX_MODEL_LEN: Final = 1024
_GREEDY_TOKENS: Final = 24
_KV_CACHE_TOKEN_BYTES: Final = 2 * 36 * 8 * 128 * 2  # keys and values of the large model, in bf16
_KV_CACHE_SPARE: Final = 1.5


@dataclass(frozen=True, slots=True)
class BroadcastEnds:
    """The ends of the raw broadcast, which have met, each on the GPU of its number; or, where
    trainer and engine share a GPU, one process that copies within it."""

    workers: tuple[Worker, ...]

    async def raw_ms(self) -> float:
        """One broadcast, until all are done; alone, a copy."""
        if len(self.workers) == 1:
            return await self.copy_ms()
        return float(max(await asyncio.gather(*(end.ask("broadcast_ms") for end in self.workers))))

    async def copy_ms(self) -> float:
        """One copy of as many bytes within the last one's memory."""
        return float(await self.workers[-1].ask("copy_ms"))


async def raw_ends(
    bench: Bench, device: Device, size_bytes: int, *, alone: bool = False, **how: Any
) -> BroadcastEnds:
    """Start them.

    Args:
        bench: ends them.
        device: where they are.
        size_bytes: of a broadcast.
        alone: there is one, since what is measured stays on one GPU.
        how: more for :meth:`sidecar.bench.harness.Bench.launch`.
    """
    count = 1 if alone else 2
    same: dict[str, Any] = {
        "count": count,
        "port": free_port(),
        "device": device,
        "size_bytes": size_bytes,
    }
    workers = [
        await bench.launch("broadcast", name=f"raw-{rank}", rank=rank, **same, **how)
        for rank in range(count)
    ]
    await asyncio.gather(*(each.hello() for each in workers))
    return BroadcastEnds(tuple(workers))


@dataclass(frozen=True)
class ServedAnswer:
    """What a server answers with, and vLLM's own checksums of its weights."""

    tokens: tuple[int, ...]
    checksums: dict[str, str]


@dataclass(frozen=True)
class Fleet:
    """All processes.

    Attributes:
        servers, urls: by name, rank by rank: one, or those of a DP group.
        made: what the trainer says of the model: ``size_bytes``, ``tensors``.
    """

    trainer: Worker
    servers: dict[str, list[Worker]]
    urls: dict[str, list[str]]
    ends: BroadcastEnds
    made: dict[str, Any]

    async def update(self, way: str) -> dict[str, Any]:
        """One, and what it took."""
        return dict(await self.trainer.ask("update", way=way))

    async def serves(self, name: str) -> list[ServedAnswer]:
        """Asked one rank after the other, so that each steps with the same."""
        return [await _served(url) for url in self.urls[name]]

    async def expected(self) -> tuple[int, ...]:
        """What the trainer's own model answers to the same request, on a CPU."""
        asked = {"prompt": prompt_of(0), "tokens": _GREEDY_TOKENS}
        return tuple(await self.trainer.ask("greedy", **asked))


async def _served(url: str) -> ServedAnswer:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{url}/weight_checker", json={"action": "checksum"}, raise_for_status=True
        ) as response,
    ):
        sums = dict((await response.json())["checksums"])
    return ServedAnswer(tuple(await greedy(url, _GREEDY_TOKENS)), sums)


async def fleet(bench: Bench, plan: EnginesPlan, servers: Mapping[str, str]) -> Fleet:
    """Start everything.

    Args:
        bench: ends it.
        plan: what is measured.
        servers: the worker engine that each is booted with; one of them is ``native``.
    """
    model = bench.folder() / "model"
    address = await bench.broker()
    trainer, made = await bench.start(
        "vllm_trainer",
        env={"VLLM_LOGGING_STREAM": "ext://sys.stderr"},  # it answers on stdout
        **_SLOW,
        **trainer_settings(plan, address, servers, model),
    )
    each_of = "" if plan.dp_size == 1 else f", each of {plan.dp_size} ranks"
    say(f"starting {len(servers)} servers of {plan.model}{each_of}")
    started: dict[str, list[Worker]] = {}
    for name, engine in servers.items():
        settings = server_settings(plan, engine, name, "" if name == NATIVE else address, model)
        started[name] = [
            await bench.launch(
                "vllm_server",
                name=name if plan.dp_size == 1 else f"{name}-{rank}",
                grace_s=_GRACE_S,
                **_SLOW,
                **each,
            )
            for rank, each in enumerate(settings)
        ]
    # All boot at once, and whichever breaks first tells why.
    booted = await asyncio.gather(*(_urls(ranks) for ranks in started.values()))
    urls = dict(zip(started, booted, strict=True))
    alone = plan.device == "cuda" and plan.one_gpu
    ends = await raw_ends(bench, plan.device, made["size_bytes"], alone=alone, **_SLOW)
    await trainer.ask("open", urls=urls[NATIVE])
    return Fleet(trainer, started, urls, ends, made)


async def _urls(ranks: Iterable[Worker]) -> list[str]:
    """Where they take requests, once all of them do."""
    return [said["url"] for said in await asyncio.gather(*(rank.hello() for rank in ranks))]


def group_of(server: str) -> str:
    """The group that a server is alone in."""
    return server.replace("_", "-")


def trainer_settings(
    plan: EnginesPlan, address: str, servers: Iterable[str], model: Path
) -> dict[str, Any]:
    """Of :mod:`sidecar.bench.programs.vllm_trainer`."""
    cuda = plan.device == "cuda"
    return {
        "broker": address,
        "groups": {name: group_of(name) for name in servers},
        "folder": str(model),
        "model": plan.model,
        "device": "cuda:0" if cuda else "cpu",
        # Of its kind both ends are on one GPU: there the trainer has its weights, too.
        "bus_device": f"cuda:{plan.gpus[0]}" if cuda and plan.over == "ipc" else "",
        "ranks": plan.dp_size,
        "gpus": [f"cuda:{gpu}" for gpu in plan.gpus] if cuda else [],
        "native_engine": plan.native,
        "native_packed": plan.native_packed,
        "backend": plan.over,
        "chunk_bytes": plan.chunk_bytes,
        "packed": plan.packed,
        "clear_cache": plan.clear_cache,
    }


def server_settings(
    plan: EnginesPlan, engine: str, name: str, address: str, model: Path
) -> list[dict[str, Any]]:
    """Of :mod:`sidecar.bench.programs.vllm_server`: a server's, or those of all its ranks."""
    cpu, lockstep, port = plan.device == "cpu", plan.dp_size > 1, free_port(_HOST)
    argv = (
        *("--model", str(model), "--served-model-name=bench", "--load-format=dummy"),
        *(step_graphs(plan.requests) if plan.cuda_graphs else ("--enforce-eager",)),
        *(f"--max-num-seqs={plan.requests}", f"--max-model-len={_MAX_MODEL_LEN}"),
        *("--no-enable-prefix-caching", "--weight-transfer-config"),
        json.dumps({"backend": engine}),
        f"--dtype={'float32' if cpu else 'bfloat16'}",
        # Several boot at once: none may measure what is free.
        *(() if cpu else ("--gpu-memory-utilization=0.05",)),
        *(() if cpu else (f"--kv-cache-memory-bytes={_kv_cache_bytes(plan)}",)),
        # vLLM's CPU kernels can't: there each rank has a share of every expert.
        *(("--enable-expert-parallel",) if lockstep and not cpu else ()),
    )
    # vLLM alone gets its IPC engine's handles pickled over HTTP.
    insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if engine == "ipc" and not address else {}
    on_bus: dict[str, Any] = {"broker": address, "group": group_of(name)} if address else {}
    return [
        {
            "argv": server_argv(
                *argv, *(rank_options(rank, plan.dp_size, _HOST, port) if lockstep else ())
            ),
            "variables": {
                **(on_cpu() if cpu else {"CUDA_VISIBLE_DEVICES": _visible(plan.gpus[rank])}),
                **insecure,
            },
            **on_bus,
            **({"dp_rank": rank} if address and lockstep else {}),
        }
        for rank in range(plan.dp_size)
    ]


def server_argv(*options: str) -> list[str]:
    """The command of a vLLM server that needs no tokenizer."""
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, "--skip-tokenizer-init", *options]


def on_cpu() -> dict[str, str]:
    """What a server's environment has on a CPU, unless the user knows better."""
    return {name: os.environ.get(name, value) for name, value in VLLM_ON_CPU.items()}


def step_graphs(requests: int) -> tuple[str, ...]:
    """vLLM's options with which a step of so many requests is one graph; without its compiler,
    which takes longer than all that is measured."""
    config = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [requests],
    }
    return "--no-enforce-eager", "--compilation-config", json.dumps(config)


def _kv_cache_bytes(plan: EnginesPlan) -> int:
    """Enough for all requests at once: one that is put off would make a gap of its own."""
    tokens = plan.requests * (PROMPT_TOKENS + plan.tokens) + _MAX_MODEL_LEN
    return int(tokens * _KV_CACHE_TOKEN_BYTES * _KV_CACHE_SPARE)


def _visible(gpu: int) -> str:
    """As the variable names it."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[gpu] if seen else str(gpu)
