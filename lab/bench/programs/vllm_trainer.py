"""The program of a trainer that updates vLLM servers, in several ways."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

from lab.bench.programs.measured_agent import BOOT_S, MeasuredAgent, reported
from lab.bench.programs.native import NativeUpdate
from lab.network import Network, PolicyConfig, write_config
from trainer_agent._agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AsyncExitStack

    from trainer_agent._options import How

_8B: Final[dict[str, Any]] = {
    "vocab_size": 151_936,
    "num_heads": 32,
    "head_dim": 128,
    "max_positions": 4096,
}
_TINY: Final[dict[str, Any]] = {"vocab_size": 1024, "head_dim": 64, "max_positions": 4096}
MODELS: Final = {
    # The shape of Qwen3-8B: 8.19 billion parameters in 399 tensors.
    "8b": PolicyConfig(
        hidden_size=4096, intermediate_size=12_288, num_layers=36, num_kv_heads=8, **_8B
    ),
    # 26 million parameters in 91 tensors: slow enough on a CPU to follow token by token.
    "tiny": PolicyConfig(
        hidden_size=512, intermediate_size=1536, num_layers=8, num_heads=8, num_kv_heads=4, **_TINY
    ),
    # A mixture of 64 experts, eight for each token: 7.04 billion parameters in 4,023 tensors.
    "moe": PolicyConfig(
        hidden_size=2048,
        num_layers=20,
        num_kv_heads=4,
        experts=64,
        experts_per_token=8,
        expert_size=768,
        **_8B,
    ),
    # A mixture for CPUs: 21 million parameters in 345 tensors.
    "tiny-moe": PolicyConfig(
        hidden_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        experts=16,
        experts_per_token=2,
        expert_size=256,
        **_TINY,
    ),
}


def random_weights(config: PolicyConfig, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Returns random weights of a model, scaled so that activations keep their size."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Network(config).named_parameters()}
    generator = torch.Generator(device).manual_seed(7)
    return {
        name: torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 1
        else torch.empty(shape, dtype=dtype, device=device).normal_(
            0.0, float(shape[1]) ** -0.5, generator=generator
        )
        for name, shape in shapes.items()
    }


class BusNative:
    """Sends updates over the bus with vLLM's own trainer engine and worker engine."""

    def __init__(self, agent: TrainerAgent, info: Any, weights: dict[str, torch.Tensor]) -> None:
        self._agent = agent
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            info, client=agent.client(how="paused"), source=agent.source(weights)
        )

    def update(self) -> dict[str, Any]:
        """Makes one update, and returns its times."""
        since_s = time.monotonic()
        self._trainer.send_weights()
        return {"since_s": since_s, "until_s": time.monotonic(), **reported(self._agent)}


class VllmTrainer:
    """Sends a model to vLLM servers again and again, in several ways, without training it.

    The settings are as for :func:`vllm_trainer`.
    """

    def __init__(self, stack: AsyncExitStack, settings: dict[str, Any]) -> None:
        self._stack = stack
        self._settings = settings
        self._config = MODELS[settings["model"]]
        device, cpu = settings["device"], settings["device"] == "cpu"
        if not cpu:
            torch.cuda.set_device(device)
        dtype = torch.float32 if cpu else torch.bfloat16
        self._weights = random_weights(self._config, device, dtype)
        size_bytes = sum(each.numel() * each.element_size() for each in self._weights.values())
        self.hello = {"size_bytes": size_bytes, "tensors": len(self._weights)}

    async def open(self, urls: dict[str, list[str]]) -> None:
        """Opens transports to all servers, with a bus or without; waits for engines to join.

        Args:
            urls: by way, the URLs that vLLM's own client calls: of the servers without a bus, or of
                a gateway.
        """
        load_general_plugins()  # trainer engines of others come with them
        given = self._settings
        bus_device, groups, engine = given["bus_device"], given["groups"], given["native_engine"]
        self._sent = self._weights
        if bus_device:
            self._sent = {name: each.to(bus_device) for name, each in self._weights.items()}
        options = {name: given[name] for name in ("backend", "chunk_bytes", "packed")}
        self._ours = await self._stack.enter_async_context(
            MeasuredAgent(
                given["broker"], group=groups["bus"], name="ours", device=bus_device, **options
            )
        )
        await self._ours.wait_for_engines(given["ranks"], timeout_s=BOOT_S)
        native = functools.partial(
            NativeUpdate,
            gpus=given["gpus"],
            packed=given["native_packed"],
        )
        in_thread = anyio.to_thread.run_sync
        self._others: dict[str, NativeUpdate | BusNative] = {}
        for way, called in urls.items():
            clear_cache = given["clear_cache"] if way == "native" else None
            update = functools.partial(native, called, engine, self._weights)
            self._others[way] = await in_thread(functools.partial(update, clear_cache=clear_cache))
        if "bus_native" in groups:
            theirs = TrainerAgent(given["broker"], group=groups["bus_native"], name="theirs")
            await self._stack.enter_async_context(theirs)
            await theirs.wait_for_engines(1, timeout_s=BOOT_S)
            info = await theirs.init_info(engine)
            self._others["bus_native"] = await in_thread(BusNative, theirs, info, self._weights)

    async def update(self, way: str) -> dict[str, Any]:
        """Makes one update, and returns its times.

        Args:
            way: ``native``: vLLM's own, over HTTP; ``gateway``: the same, through a gateway;
                ``bus_native``: the bus, with vLLM's trainer engine; ``paused``, ``staged`` or
                ``agent``: the bus, with a backend of wavebus's; ``agent`` is staged.
        """
        if way in self._others:
            return dict(await anyio.to_thread.run_sync(self._others[way].update))
        how: How = "staged" if way in ("staged", "agent") else "paused"
        clear_cache = self._settings["clear_cache"]
        return await self._ours.measured_update(self._sent, how=how, clear_cache=clear_cache)

    async def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Returns the tokens that this trainer's model continues a prompt with; on a CPU only."""
        return await anyio.to_thread.run_sync(self._greedy, prompt, tokens)

    def _greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        with torch.device("meta"):
            policy = Network(self._config)
        policy.load_state_dict(self._weights, assign=True)
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(tokens):
                ids.append(int(policy(torch.tensor([ids]))[0, -1].argmax()))
        return ids[len(prompt) :]


async def vllm_trainer(stack: AsyncExitStack, **settings: Any) -> VllmTrainer:
    """Makes a trainer with a model, and writes the model's ``config.json`` for the servers.

    Args:
        stack: ends the agents.
        settings: what :func:`lab.bench.fleet.trainer_settings` returns. ``groups`` has a group
            for the way ``bus`` and, if it is measured, for ``bus_native``. ``ranks`` is the number
            of servers of each way, and ``gpus`` are their GPUs. ``bus_device`` is the device whose
            weights wavebus's backend sends; empty: ``device``.
    """
    torch.set_num_threads(1)
    write_config(MODELS[settings["model"]], Path(settings["folder"]))
    return VllmTrainer(stack, settings)
