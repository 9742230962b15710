"""Starts what the benches of updates measure: a trainer, engines, and raw broadcasts.

With vLLM, the trainer uses one GPU, and all servers share another, each with its own weights. Only
one server at a time has requests. If the ways to be measured work only within one GPU, the trainer
and all servers use that GPU. The server ``native`` is vLLM alone. Every other server has a sidecar,
and is the only engine of a group with its name.

A DP group may take the place of each server: its ranks run in lockstep over a mixture of experts.
Rank ``r`` of each then uses GPU ``r``, and the trainer the first. Without GPUs all models are
small, and share the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from lab.bench.harness import say
from lab.bench.streams import PROMPT_TOKENS, greedy, prompt_of
from lab.demo.processes import VLLM_ON_CPU
from sidecar._supervision.launch import free_port
from sidecar._supervision.ranks import rank_options

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from lab.bench.harness import Bench, Worker
    from lab.bench.plans import Device, EnginesPlan

NATIVE: Final = "native"
BUS: Final = "bus"
# Of `bench transfer --gateway`: the ways, and the group behind the gateway.
AGENT: Final = "agent"
GATEWAY: Final = "gateway"
# Part of the name of experts' parameters in vLLM; and the note if experts are left out.
_EXPERTS: Final = ".routed_experts."
_LEFT_OUT: Final = "native's tokens and experts, which its own update leaves unpacked on a CPU"
_HOST: Final = "127.0.0.1"
_SLOW: Final[dict[str, Any]] = {"answer_s": 400.0}  # booting, and meeting for the first time
_GRACE_S: Final = 40.0
_MAX_MODEL_LEN: Final = 1024
_GREEDY_TOKENS: Final = 24
_KV_CACHE_TOKEN_BYTES: Final = 2 * 36 * 8 * 128 * 2  # keys and values of the large model, in bf16
_KV_CACHE_SPARE: Final = 1.5


async def raw_ends(
    bench: Bench, device: Device, size_bytes: int, *, alone: bool = False, **how: Any
) -> list[Worker]:
    """Starts the processes that broadcast as many bytes as an update has, for comparison.

    Process ``k`` uses GPU ``k``. If ``alone``, there is one process, because trainer and engine
    share a GPU.
    """
    same = {"count": 1 if alone else 2, "port": free_port(), "device": device, **how}
    workers = [
        await bench.launch(
            "broadcast", name=f"raw-{rank}", rank=rank, size_bytes=size_bytes, **same
        )
        for rank in range(same["count"])
    ]
    await asyncio.gather(*(each.hello() for each in workers))
    return workers


async def raw_ms(ends: Sequence[Worker]) -> float:
    """Returns the time of one broadcast, in ms; with a single process, of one copy."""
    if len(ends) == 1:
        return await copy_ms(ends)
    return float(max(await asyncio.gather(*(end.ask("broadcast_ms") for end in ends))))


async def copy_ms(ends: Sequence[Worker]) -> float:
    """Returns the time of one copy within the memory of the last process, in ms."""
    return float(await ends[-1].ask("copy_ms"))


@dataclass(frozen=True)
class UpdatedEngines:
    """A running trainer with its engines, and the functions that a bench calls on them.

    Attributes:
        update: makes one update in the way of this name, and returns its times.
        urls: by way, the URLs of its engines, rank by rank.
        engines: by way, the processes of its engines, which report their calls.
        raw_ms: returns the time of one transfer of ``size_bytes`` without an update around it, in
            ms.
        copy_ms: returns the time of one copy of ``size_bytes`` within an engine's memory, in ms.
        serves: returns something that is equal for two ways if their engines serve equal weights.
        not_compared: what ``serves`` does not compare, and why; empty if it compares everything.
        size_bytes: the size of the model's weights, in bytes.
        tensors: how many tensors the model has.
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


@dataclass(frozen=True)
class ServedAnswer:
    """Evidence of a vLLM server's weights: its tokens for a prompt, and vLLM's checksums."""

    tokens: tuple[int, ...]
    checksums: dict[str, str]


def without_experts(served: ServedAnswer, expected: tuple[int, ...] = ()) -> ServedAnswer:
    """Removes the experts' checksums from an answer; replaces its tokens, if some are expected."""
    sums = {name: sum_ for name, sum_ in served.checksums.items() if _EXPERTS not in name}
    return ServedAnswer(expected or served.tokens, sums)


async def _served(url: str) -> ServedAnswer:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{url}/weight_checker", json={"action": "checksum"}, raise_for_status=True
        ) as response,
    ):
        sums = dict((await response.json())["checksums"])
    return ServedAnswer(tuple(await greedy(url, _GREEDY_TOKENS)), sums)


async def start_embedded(
    bench: Bench, plan: EnginesPlan, ways: Mapping[str, str]
) -> UpdatedEngines:
    """Starts a broker, a trainer and two groups of embedded engines, each engine a process.

    One group is on the bus, and the trainer calls the other group's engines directly. Over ``shm``,
    both ways send the weights from shared memory without a copy. ``ways`` has each way's group.
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
        urls[group] = await _urls(engines[group])
    shutil.rmtree(checkpoint)  # the engines have it in memory
    await trainer.ask("open", engines=plan.dp_size, backend=plan.over, sockets=sockets)

    async def trainer_copy_ms() -> float:
        return float(await trainer.ask("memcpy_ms"))

    raw = trainer_copy_ms
    if plan.over != "shm":
        raw = partial(raw_ms, await raw_ends(bench, "cpu", made["size_bytes"]))

    async def update(way: str) -> dict[str, Any]:
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
        raw_ms=raw,
        copy_ms=trainer_copy_ms,
        serves=serves,
        **made,
    )


async def start_vllm(bench: Bench, plan: EnginesPlan, ways: Mapping[str, str]) -> UpdatedEngines:
    """Starts a trainer and servers (or DP groups): vLLM alone, and others with a sidecar.

    After the updates all servers must serve the same weights, by their tokens and checksums, with
    one exception. On CPUs, vLLM packs experts for its kernels when they are first loaded, but not
    at updates (0.32; see :mod:`sidecar._vllm.plugin.loading.cpu`). So the experts of a server that
    vLLM updates by itself give wrong answers. These experts and answers are not compared, and the
    other servers' answers are compared with those of the trainer's own model. ``ways`` has each
    way's server. ``native`` is updated without a bus, and ``gateway`` through a gateway.
    """
    model = bench.folder() / "model"
    address = await bench.broker()
    engines = {name: "wavebus" if name == BUS else plan.native for name in ways.values()}
    trainer, made = await bench.start(
        "vllm_trainer",
        env={"VLLM_LOGGING_STREAM": "ext://sys.stderr"},  # stdout is for answers
        **_SLOW,
        **trainer_settings(plan, address, engines, model),
    )
    each_of = "" if plan.dp_size == 1 else f", each of {plan.dp_size} ranks"
    say(f"starting {len(engines)} servers of {plan.model}{each_of}")
    servers: dict[str, list[Worker]] = {}
    for name, engine in engines.items():
        settings = server_settings(plan, engine, name, "" if name == NATIVE else address, model)
        servers[name] = [
            await bench.launch(
                "vllm_server",
                name=name if plan.dp_size == 1 else f"{name}-{rank}",
                grace_s=_GRACE_S,
                **_SLOW,
                **each,
            )
            for rank, each in enumerate(settings)
        ]
    # All boot at once; the first that fails raises its error.
    booted = await asyncio.gather(*(_urls(ranks) for ranks in servers.values()))
    urls = dict(zip(servers, booted, strict=True))
    alone = plan.device == "cuda" and plan.one_gpu
    ends = await raw_ends(bench, plan.device, made["size_bytes"], alone=alone, **_SLOW)
    over_http = {name: urls[name] for name in (NATIVE, GATEWAY) if name in urls}
    if GATEWAY in urls:
        reads = ("--allow-pickled-handles",) if plan.native == "ipc" else ()
        over_http[GATEWAY] = [(await bench.gateway(address, group_of(GATEWAY), *reads))[0]]
    await trainer.ask("open", urls=over_http)
    unpacked = plan.mixture and plan.device == "cpu"
    expected: tuple[int, ...] = ()
    if unpacked:
        asked = {"prompt": prompt_of(0), "tokens": _GREEDY_TOKENS}
        expected = tuple(await trainer.ask("greedy", **asked))

    async def update(way: str) -> dict[str, Any]:
        return dict(await trainer.ask("update", way=way))

    async def serves(way: str) -> object:
        # One rank after the other, so that each steps with the same batch.
        served = [await _served(url) for url in urls[ways[way]]]
        if not unpacked:
            return served
        return [without_experts(each, expected if way == NATIVE else ()) for each in served]

    return UpdatedEngines(
        update=update,
        urls={way: urls[name] for way, name in ways.items()},
        engines={way: servers[name] for way, name in ways.items()},
        raw_ms=partial(raw_ms, ends),
        copy_ms=partial(copy_ms, ends),
        serves=serves,
        **made,
        not_compared=_LEFT_OUT if unpacked else "",
    )


async def _urls(ranks: Iterable[Worker]) -> list[str]:
    """Waits until all ranks take requests, and returns their URLs."""
    return [said["url"] for said in await asyncio.gather(*(rank.hello() for rank in ranks))]


def group_of(server: str) -> str:
    """Returns the name of the group whose only engine is this server."""
    return server.replace("_", "-")


def trainer_settings(
    plan: EnginesPlan, address: str, servers: Iterable[str], model: Path
) -> dict[str, Any]:
    """Returns the settings of :mod:`lab.bench.programs.vllm_trainer`, for these options.

    The trainer writes the configuration into the folder ``model``, for all ``servers``.
    """
    cuda = plan.device == "cuda"
    return {
        "broker": address,
        "groups": {name: group_of(name) for name in servers},
        "folder": str(model),
        "model": plan.model,
        "device": "cuda:0" if cuda else "cpu",
        # Over ipc both ends are on one GPU, so the trainer has a copy of its weights there.
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
    """Returns the settings of :mod:`lab.bench.programs.vllm_server`, for each of its ranks.

    The server has vLLM's weight transfer backend ``engine``. Without the address of a broker it is
    vLLM alone.
    """
    cpu, lockstep, port = plan.device == "cpu", plan.dp_size > 1, free_port(_HOST)
    argv = (
        *("--model", str(model), "--served-model-name=bench", "--load-format=dummy"),
        *(step_graphs(plan.requests) if plan.cuda_graphs else ("--enforce-eager",)),
        *(f"--max-num-seqs={plan.requests}", f"--max-model-len={_MAX_MODEL_LEN}"),
        *("--no-enable-prefix-caching", "--weight-transfer-config"),
        json.dumps({"backend": engine}),
        f"--dtype={'float32' if cpu else 'bfloat16'}",
        # Several servers boot at once, so none may measure the free memory.
        *(() if cpu else ("--gpu-memory-utilization=0.05",)),
        *(() if cpu else (f"--kv-cache-memory-bytes={_kv_cache_bytes(plan)}",)),
        # vLLM's CPU kernels can't spread experts: each rank has a share of every expert there.
        *(("--enable-expert-parallel",) if lockstep and not cpu else ()),
    )
    # Without a bus, vLLM's IPC engine gets pickled handles over HTTP.
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
    """Returns the command of a vLLM server without a tokenizer, with further options."""
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, "--skip-tokenizer-init", *options]


def on_cpu() -> dict[str, str]:
    """Returns the environment variables of a vLLM server on a CPU.

    Variables that the user has set keep their values.
    """
    return {name: os.environ.get(name, value) for name, value in VLLM_ON_CPU.items()}


def step_graphs(requests: int) -> tuple[str, ...]:
    """Returns vLLM's options that run a step of this many requests as one CUDA graph.

    vLLM's compiler stays off, because compiling takes longer than the whole measurement.
    """
    config = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [requests],
    }
    return "--no-enforce-eager", "--compilation-config", json.dumps(config)


def _kv_cache_bytes(plan: EnginesPlan) -> int:
    """Returns the KV cache's size that fits all requests at once, in bytes.

    A request that has to wait for memory would add a gap of its own.
    """
    tokens = plan.requests * (PROMPT_TOKENS + plan.tokens) + _MAX_MODEL_LEN
    return int(tokens * _KV_CACHE_TOKEN_BYTES * _KV_CACHE_SPARE)


def _visible(gpu: int) -> str:
    """Returns a GPU as ``CUDA_VISIBLE_DEVICES`` names it."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[gpu] if seen else str(gpu)
