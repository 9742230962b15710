"""The trainer of benches of vLLM: a process that makes a model on its GPU, and sends it on command,
in several ways.

``python -m trainer_agent.bench.gap_vllm SETTINGS LOOP``, until stdin ends; SETTINGS is a
:class:`Settings` in JSON. It writes the model's ``config.json`` into the folder and says the
model's size. With the first line it is told the URLs of the servers that have no bus, as a JSON
list; it then opens its transports, waiting for the engines of the others, and says so. After that
each line names a way, and is answered with what one update took, and when its parts were, in
seconds on ``time.monotonic()``'s clock, which all processes of a host share:

- ``native``: vLLM's own, over HTTP (:mod:`trainer_agent.bench.native`).
- ``bus_native``: the bus, with the same trainer engine, if there is a group of that name.
- ``paused`` (``bus`` is the same) and ``staged``: the bus, with a backend of wavebus's.

A JSON object is asked for tokens: so many (``tokens``) greedy ones after a ``prompt``, by the
trainer's own model, on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import anyio.to_thread
import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

import bus.log
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from trainer_agent.agent import TrainerAgent
from trainer_agent.bench.native import NativeUpdate
from trainer_agent.bench.transfer import BOOT_S, MeasuredAgent, bus_update
from trainer_agent.demo.policy import Policy, PolicyConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.runtime.event_loop import LoopChoice
    from trainer_agent.options import How
    from trainer_agent.report import UpdateReport

MODELS: Final = {
    # The shape of Qwen3-8B: 8.19 billion parameters in 399 tensors.
    "8b": PolicyConfig(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=4096,
    ),
    # 26 million in 91: on a CPU it decodes slowly enough to be followed token by token.
    "tiny": PolicyConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        max_positions=4096,
    ),
    # A mixture of 64 experts, of which a token takes eight: 7.04 billion in 4,023.
    "moe": PolicyConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=20,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        max_positions=4096,
        experts=64,
        experts_per_token=8,
        expert_size=768,
    ),
    # 21 million in 345: the same for CPUs.
    "tiny-moe": PolicyConfig(
        vocab_size=1024,
        hidden_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=4096,
        experts=16,
        experts_per_token=2,
        expert_size=256,
    ),
}


@dataclass(frozen=True)
class VllmGapSettings:
    """What to send, and how.

    Attributes:
        groups: ``bus`` and, if it is to be measured, ``bus_native``: that each engine is alone in.
        ranks: servers of each way: one, or all ranks of a DP group.
        gpus: where those are.
        bus_device: where weights lie that a backend of wavebus's sends; empty: on ``device``, as
            all others.
    """

    broker: str
    groups: dict[str, str]
    folder: str
    model: str
    device: str
    bus_device: str
    ranks: int
    gpus: list[str]
    native_engine: str
    native_packed: bool | None
    backend: str
    chunk_bytes: int
    packed: bool
    clear_cache: bool


def random_weights(config: PolicyConfig, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Of a model of that shape, made where they are to lie: norms near one, and the rest drawn so
    that activations keep their size."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Policy(config).named_parameters()}
    generator = torch.Generator(device).manual_seed(7)
    return {
        name: torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 1
        else torch.empty(shape, dtype=dtype, device=device).normal_(
            0.0, float(shape[1]) ** -0.5, generator=generator
        )
        for name, shape in shapes.items()
    }


def write_config(config: PolicyConfig, folder: Path) -> None:
    """All that a server needs which makes up its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")


def greedy(
    config: PolicyConfig, weights: dict[str, torch.Tensor], prompt: Sequence[int], tokens: int
) -> list[int]:
    """What a model of these weights goes on with, each time computed anew."""
    with torch.device("meta"):
        policy = Policy(config)
    policy.load_state_dict(weights, assign=True)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(policy(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


class BusNative:
    """The bus, with vLLM's trainer engine and worker engine."""

    def __init__(self, agent: TrainerAgent, info: Any, weights: dict[str, torch.Tensor]) -> None:
        self._agent = agent
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            info, client=agent.client(), source=agent.source(weights)
        )

    def update(self) -> dict[str, Any]:
        since_s = time.monotonic()
        self._trainer.send_weights()
        return {
            "since_s": since_s,
            "until_s": time.monotonic(),
            **_reported(self._agent.last_update),
        }


def _reported(report: UpdateReport | None) -> dict[str, Any]:
    assert report is not None, "an update has just been made"
    return {
        "window_ms": report.paused_ms,
        "interrupted": report.interrupted,
        "chunks": report.chunks,
        "verified": report.verified,
        "calls": [],
    }


async def drive(settings: VllmGapSettings) -> None:
    """Make the model, open the transports, and do what is asked, until stdin ends."""
    config = MODELS[settings.model]
    write_config(config, Path(settings.folder))
    cpu = settings.device == "cpu"
    if not cpu:
        torch.cuda.set_device(settings.device)
    dtype = torch.float32 if cpu else torch.bfloat16
    weights = random_weights(config, settings.device, dtype)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    write_answer(size_bytes=size_bytes, tensors=len(weights))
    load_general_plugins()  # trainer engines of others come with them
    lines = read_commands()
    urls = json.loads(await anext(lines))
    sent = weights
    if settings.bus_device:
        sent = {name: tensor.to(settings.bus_device) for name, tensor in weights.items()}
    ours = MeasuredAgent(
        settings.broker,
        group=settings.groups["bus"],
        name="ours",
        backend=settings.backend,
        chunk_bytes=settings.chunk_bytes,
        packed=settings.packed,
        device=settings.bus_device,
    )
    in_thread = anyio.to_thread.run_sync
    clear_cache = settings.clear_cache
    bus_native: BusNative | None = None
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(ours)
        await ours.wait_for_engines(settings.ranks, timeout_s=BOOT_S)
        native = await in_thread(
            functools.partial(
                NativeUpdate,
                gpus=settings.gpus,
                packed=settings.native_packed,
                clear_cache=clear_cache,
            ),
            *(urls, settings.native_engine, weights),
        )
        if "bus_native" in settings.groups:
            theirs = TrainerAgent(
                settings.broker, group=settings.groups["bus_native"], name="theirs"
            )
            await stack.enter_async_context(theirs)
            await theirs.wait_for_engines(1, timeout_s=BOOT_S)
            info = await theirs.init_info(settings.native_engine)
            bus_native = await in_thread(BusNative, theirs, info, weights)
        write_answer(ready=True)
        async for way in lines:
            if way == "native":
                write_answer(**await in_thread(native.update))
            elif way == "bus_native":
                assert bus_native is not None
                write_answer(**await in_thread(bus_native.update))
            elif way.startswith("{"):
                write_answer(
                    tokens=await in_thread(
                        functools.partial(greedy, config, weights, **json.loads(way))
                    )
                )
            else:
                how: How = "staged" if way == "staged" else "paused"
                write_answer(**await bus_update(ours, sent, how=how, clear_cache=clear_cache))


if __name__ == "__main__":
    text, kind = sys.argv[1:]
    bus.log.configure(json=True)
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        event_loop.run(drive(VllmGapSettings(**json.loads(text))), loop=cast("LoopChoice", kind))
