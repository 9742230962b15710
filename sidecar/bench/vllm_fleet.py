"""What benches of vLLM servers have in common: a trainer and several servers of one model.

The trainer is on one GPU, the servers side by side on another, each with weights of its own; one at
a time has requests. ``native`` is vLLM alone; the others have a sidecar, and each is alone in a
group of its name. On a CPU all are small, and share it.
"""

from __future__ import annotations

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
from sidecar.bench.ends import ends
from sidecar.bench.processes import VLLM_ON_CPU, Worker, worker
from sidecar.bench.serving import Settings
from sidecar.bench.streams import PROMPT_TOKENS, greedy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from bus.runtime.loop import LoopChoice
    from sidecar.bench.ends import Device, Ends

    Progress = Callable[[str], None]

Model: TypeAlias = Literal["8b", "tiny"]

NATIVE: Final = "native"
_GPUS: Final = 2
_ANSWER_S: Final = 400.0  # booting, and meeting for the first time
_GRACE_S: Final = 40.0
_MAX_MODEL_LEN: Final = 1024
_GREEDY_TOKENS: Final = 24
_KV_CACHE_TOKEN_BYTES: Final = 2 * 36 * 8 * 128 * 2  # keys and values of the large model, in bf16
_KV_CACHE_SPARE: Final = 1.5


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        native_engine: the trainer and worker engine of vLLM's, by its name there.
        backend: of wavebus's; with ``chunk_bytes`` and ``packed``.
        tokens: of each request.
        clear_cache: requests compute their keys and values anew after an update; in all ways.
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


@dataclass(frozen=True)
class Fleet:
    """All processes.

    Attributes:
        made: what the trainer says of the model: ``size_bytes``, ``tensors``.
    """

    trainer: Worker
    servers: dict[str, Worker]
    urls: dict[str, str]
    ends: Ends
    made: dict[str, Any]

    async def serves(self, name: str) -> tuple[list[int], dict[str, str]]:
        """What a server answers with, and vLLM's own checksums of its weights."""
        url = self.urls[name]
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{url}/weight_checker", json={"action": "checksum"}, raise_for_status=True
            ) as response,
        ):
            sums = dict((await response.json())["checksums"])
        return await greedy(url, _GREEDY_TOKENS), sums


@contextlib.asynccontextmanager
async def fleet(
    plan: Plan, servers: Mapping[str, str], loop: LoopChoice, say: Progress, logs: Path | None
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
            "trainer_agent.bench_vllm",
            json.dumps(_trainer_settings(plan, address, groups, model)),
            env={"VLLM_LOGGING_STREAM": "ext://sys.stderr"},  # it answers on stdout
        )
        made = await trainer.answer()
        say(f"starting {len(servers)} servers of {plan.model}")
        started: dict[str, Worker] = {}
        for name, engine in servers.items():
            on = "" if name == NATIVE else address
            told = _server_settings(plan, engine, groups[name], on, model).to_json()
            started[name] = await start(name, "sidecar.bench.serving", told, grace_s=_GRACE_S)
        urls = {name: (await server.answer())["url"] for name, server in started.items()}
        both = await stack.enter_async_context(
            ends(plan.device, made["size_bytes"], loop, logs, answer_s=_ANSWER_S)
        )
        await trainer.ask(urls[NATIVE])
        yield Fleet(trainer, started, urls, both, made)


def _trainer_settings(
    plan: Plan, address: str, groups: Mapping[str, str], model: Path
) -> dict[str, Any]:
    cuda = plan.device == "cuda"
    return {
        "broker": address,
        "groups": groups,
        "folder": str(model),
        "model": plan.model,
        "device": "cuda:0" if cuda else "cpu",
        # Of its kind both ends are on one GPU: there the trainer has its weights a second time.
        "bus_device": "cuda:1" if cuda and plan.backend == "ipc" else "",
        "native_engine": plan.native_engine,
        "backend": plan.backend,
        "chunk_bytes": plan.chunk_bytes,
        "packed": plan.packed,
        "clear_cache": plan.clear_cache,
    }


def _server_settings(plan: Plan, engine: str, group: str, address: str, model: Path) -> Settings:
    cpu = plan.device == "cpu"
    argv = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name=bench", "--load-format=dummy", "--skip-tokenizer-init"),
        *("--enforce-eager", f"--max-num-seqs={plan.requests}"),
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
    )
    env = (
        {name: os.environ.get(name, value) for name, value in VLLM_ON_CPU.items()}
        if cpu
        else {"CUDA_VISIBLE_DEVICES": _second_gpu()}
    )
    return Settings(argv, env, address, group) if address else Settings(argv, env)


def _kv_cache_bytes(plan: Plan) -> int:
    """Enough for all requests at once: one that is put off would make a gap of its own."""
    tokens = plan.requests * (PROMPT_TOKENS + plan.tokens) + _MAX_MODEL_LEN
    return int(tokens * _KV_CACHE_TOKEN_BYTES * _KV_CACHE_SPARE)


def _second_gpu() -> str:
    """As the variable names it."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[1] if seen else "1"
