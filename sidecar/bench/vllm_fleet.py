"""What benches of vLLM servers have in common: a trainer and several servers of one model.

The trainer is on one GPU, the servers side by side on another, each with weights of its own; one at
a time has requests. If all ways to send are those of one GPU, all are on it. ``native`` is vLLM
alone; the others have a sidecar, and each is alone in a group of its name. Instead of a server
there may be the ranks of a DP group, in lockstep over a mixture of experts: then rank ``r`` of each
is on GPU ``r``, and the trainer on the first. On a CPU all are small, and share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import aiohttp
import torch

from bus.errors import UsageError
from sidecar.bench.processes import VLLM_ON_CPU, Worker, worker
from sidecar.bench.streams import PROMPT_TOKENS, greedy, prompt_of
from sidecar.bench.transfer.broadcast_ends import ends
from sidecar.bench.vllm_server import VllmServerSettings
from sidecar.supervision.launch import free_port
from sidecar.supervision.ranks import rank_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.transfer.broadcast_ends import BroadcastEnds, Device

    Progress = Callable[[str], None]

Model: TypeAlias = Literal["8b", "tiny", "moe", "tiny-moe"]

NATIVE: Final = "native"
MIXTURES: Final[tuple[Model, ...]] = ("moe", "tiny-moe")
# Those of vLLM's trainer engines that this bench is for.
_OF_VLLM: Final = ("nccl", "ipc")
_TRAINER_GPU: Final = 0
# Whose trainer and servers are on one GPU, in wavebus as in vLLM.
_TOGETHER: Final = "ipc"
# Backends whose trainer has a GPU of its own, or its engines on one GPU.
_OF_ONE_SERVER: Final = ("nccl", "ipc")
_HOST: Final = "127.0.0.1"
_ANSWER_S: Final = 400.0  # booting, and meeting for the first time
_GRACE_S: Final = 40.0
_MAX_MODEL_LEN: Final = 1024
_GREEDY_TOKENS: Final = 24
_KV_CACHE_TOKEN_BYTES: Final = 2 * 36 * 8 * 128 * 2  # keys and values of the large model, in bf16
_KV_CACHE_SPARE: Final = 1.5


@dataclass(frozen=True)
class FleetPlan:
    """What is to be measured.

    Attributes:
        native_engine: the trainer and worker engine of vLLM's, by its name there;
            ``native_packed``: whether it goes through buffers, if not as vLLM has it.
        backend: of wavebus's; with ``chunk_bytes`` and ``packed``.
        tokens: of each request.
        clear_cache: requests compute their keys and values anew after an update; in all ways.
        dp_size: ranks in lockstep in place of each server, over which experts are spread; 1: none.
        cuda_graphs: steps are graphs of CUDA's, and not asked for one kernel at a time.
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
    clear_cache: bool = True
    dp_size: int = 1
    native_packed: bool | None = None
    cuda_graphs: bool = False

    def check(self) -> None:
        """Whether this can run here.

        Raises:
            UsageError: says what is missing.
        """
        if self.dp_size > 1:
            self._check_ranks()
        if self.device == "cpu":
            if self.cuda_graphs:
                raise UsageError("--cuda-graphs: a CPU has none")
            if self.native_engine in _OF_VLLM:
                raise UsageError(
                    "vLLM's own trainer engines need CUDA: on a CPU name one of a plugin of yours "
                    "with --native-engine"
                )
            return
        need, count = max(_TRAINER_GPU, *self.gpus) + 1, torch.cuda.device_count()
        if count < need:
            needed = "a GPU is" if need == 1 else f"{need} GPUs are"
            raise UsageError(f"{needed} needed, and there are {count}: {self._fewer(count)}")

    @property
    def mixture(self) -> bool:
        """Whether it is one of experts."""
        return self.model in MIXTURES

    @property
    def one_gpu(self) -> bool:
        """Whether trainer and servers share one."""
        return self.dp_size == 1 and self.native_engine == self.backend == _TOGETHER

    @property
    def gpus(self) -> list[int]:
        """Where servers are, rank by rank."""
        if self.dp_size > 1:
            return list(range(self.dp_size))
        return [_TRAINER_GPU if self.one_gpu else _TRAINER_GPU + 1]

    def _fewer(self, count: int) -> str:
        """What there is instead."""
        if count and self.dp_size == 1:
            return "on one there are --backend ipc --native-engine ipc"
        return "see --device cpu"

    def _check_ranks(self) -> None:
        if not self.mixture:
            raise UsageError(
                f"--dp-size {self.dp_size}: ranks in lockstep are those of a mixture of experts, "
                f"and {self.model} is none: choose --model {' or '.join(MIXTURES)}"
            )
        if self.requests < self.dp_size:
            raise UsageError(
                f"--requests {self.requests}: each of the {self.dp_size} ranks needs one at least"
            )
        if self.device == "cuda" and self.backend in _OF_ONE_SERVER:
            raise UsageError(
                f"--backend {self.backend}: with --dp-size each rank is on another GPU, and the "
                "trainer beside the first one: take shm or gloo"
            )
        if self.device == "cuda" and self.native_engine == "nccl":
            raise UsageError(
                "--native-engine nccl: it needs a GPU for the trainer alone, and with --dp-size "
                "there is a rank on each: take ipc"
            )


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

    async def serves(self, name: str) -> list[ServedAnswer]:
        """Asked one rank after the other, so that each steps with the same."""
        return [await _served(url) for url in self.urls[name]]

    async def expected(self) -> tuple[int, ...]:
        """What the trainer's own model answers to the same request, on a CPU."""
        asked = {"prompt": prompt_of(0), "tokens": _GREEDY_TOKENS}
        return tuple((await self.trainer.ask(json.dumps(asked)))["tokens"])


async def _served(url: str) -> ServedAnswer:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{url}/weight_checker", json={"action": "checksum"}, raise_for_status=True
        ) as response,
    ):
        sums = dict((await response.json())["checksums"])
    return ServedAnswer(tuple(await greedy(url, _GREEDY_TOKENS)), sums)


@contextlib.asynccontextmanager
async def fleet(
    plan: FleetPlan, servers: Mapping[str, str], loop: LoopChoice, say: Progress, logs: Path | None
) -> AsyncIterator[Fleet]:
    """Everything, for the length of a block.

    Args:
        servers: the worker engine that each is booted with; one of them is ``native``.
        logs: a folder that keeps what all processes log.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, module: str, *args: object, **how: Any) -> Worker:
            log_path = None if logs is None else logs / f"{name}.log"
            started = worker(module, *args, loop, answer_s=_ANSWER_S, log_path=log_path, **how)
            return await stack.enter_async_context(started)

        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wavebus-bench-"))
        model = Path(folder) / "model"
        broker = await stack.enter_async_context(worker("sidecar.bench.broker", loop))
        address = (await broker.answer())["address"]
        groups = {name: name.replace("_", "-") for name in servers}
        # By name: the two roles never import each other.
        trainer = await start(
            "trainer",
            "trainer_agent.bench.gap_vllm",
            json.dumps(_trainer_settings(plan, address, groups, model)),
            env={"VLLM_LOGGING_STREAM": "ext://sys.stderr"},  # it answers on stdout
        )
        made = await trainer.answer()
        each_of = "" if plan.dp_size == 1 else f", each of {plan.dp_size} ranks"
        say(f"starting {len(servers)} servers of {plan.model}{each_of}")
        started: dict[str, list[Worker]] = {}
        for name, engine in servers.items():
            on = "" if name == NATIVE else address
            settings = _settings_of(plan, engine, groups[name], on, model)
            logged = [name] if plan.dp_size == 1 else [f"{name}-{n}" for n in range(plan.dp_size)]
            started[name] = [
                await start(log, "sidecar.bench.vllm_server", each.to_json(), grace_s=_GRACE_S)
                for log, each in zip(logged, settings, strict=True)
            ]
        # All boot at once, and whichever breaks first tells why.
        booted = await asyncio.gather(*(_urls(ranks) for ranks in started.values()))
        urls = dict(zip(started, booted, strict=True))
        both = await stack.enter_async_context(
            ends(
                plan.device,
                made["size_bytes"],
                loop,
                logs,
                alone=plan.device == "cuda" and plan.one_gpu,
                answer_s=_ANSWER_S,
            )
        )
        await trainer.ask(json.dumps(urls[NATIVE]))
        yield Fleet(trainer, started, urls, both, made)


async def _urls(ranks: Sequence[Worker]) -> list[str]:
    """Where they take requests, once all of them do."""
    return [answer["url"] for answer in await asyncio.gather(*(rank.answer() for rank in ranks))]


def _trainer_settings(
    plan: FleetPlan, address: str, groups: Mapping[str, str], model: Path
) -> dict[str, Any]:
    cuda = plan.device == "cuda"
    return {
        "broker": address,
        "groups": groups,
        "folder": str(model),
        "model": plan.model,
        "device": f"cuda:{_TRAINER_GPU}" if cuda else "cpu",
        # Of its kind both ends are on one GPU: there the trainer has its weights, too.
        "bus_device": f"cuda:{plan.gpus[0]}" if cuda and plan.backend == "ipc" else "",
        "ranks": plan.dp_size,
        "gpus": [f"cuda:{gpu}" for gpu in plan.gpus] if cuda else [],
        "native_engine": plan.native_engine,
        "native_packed": plan.native_packed,
        "backend": plan.backend,
        "chunk_bytes": plan.chunk_bytes,
        "packed": plan.packed,
        "clear_cache": plan.clear_cache,
    }


def _settings_of(
    plan: FleetPlan, engine: str, group: str, address: str, model: Path
) -> list[VllmServerSettings]:
    """A server's, or those of all its ranks."""
    meeting_port = free_port(_HOST)
    return [
        _server_settings(plan, engine, group, address, model, rank, meeting_port)
        for rank in range(plan.dp_size)
    ]


def _server_settings(
    plan: FleetPlan,
    engine: str,
    group: str,
    address: str,
    model: Path,
    rank: int,
    meeting_port: int,
) -> VllmServerSettings:
    cpu = plan.device == "cpu"
    lockstep = plan.dp_size > 1
    argv = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name=bench", "--load-format=dummy", "--skip-tokenizer-init"),
        *(step_graphs(plan.requests) if plan.cuda_graphs else ("--enforce-eager",)),
        f"--max-num-seqs={plan.requests}",
        *(f"--max-model-len={_MAX_MODEL_LEN}", "--no-enable-prefix-caching"),
        *("--weight-transfer-config", json.dumps({"backend": engine})),
        *(
            ("--dtype=float32",)
            if cpu
            # Several boot at once: none may measure what is free.
            else (
                "--dtype=bfloat16",
                "--gpu-memory-utilization=0.05",
                f"--kv-cache-memory-bytes={_kv_cache_bytes(plan)}",
            )
        ),
        *(rank_options(rank, plan.dp_size, _HOST, meeting_port) if lockstep else ()),
        # vLLM's CPU kernels can't: there each rank has a share of every expert.
        *(("--enable-expert-parallel",) if lockstep and not cpu else ()),
    )
    env = (
        {name: os.environ.get(name, value) for name, value in VLLM_ON_CPU.items()}
        if cpu
        else {"CUDA_VISIBLE_DEVICES": _visible(plan.gpus[rank])}
    )
    if not address:
        # Its IPC engine's handles come pickled over HTTP.
        insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if engine == "ipc" else {}
        return VllmServerSettings(argv, {**env, **insecure})
    return VllmServerSettings(argv, env, address, group, rank if lockstep else None)


def step_graphs(requests: int) -> tuple[str, ...]:
    """vLLM's options with which a step of so many requests is one graph; without its compiler,
    which takes longer than all that is measured."""
    config = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [requests],
    }
    return "--no-enforce-eager", "--compilation-config", json.dumps(config)


def _kv_cache_bytes(plan: FleetPlan) -> int:
    """Enough for all requests at once: one that is put off would make a gap of its own."""
    tokens = plan.requests * (PROMPT_TOKENS + plan.tokens) + _MAX_MODEL_LEN
    return int(tokens * _KV_CACHE_TOKEN_BYTES * _KV_CACHE_SPARE)


def _visible(gpu: int) -> str:
    """As the variable names it."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[gpu] if seen else str(gpu)
