"""The trainer of benches of vLLM: a process that makes a model on its GPU, and sends it on command,
in several ways.

``python -m trainer_agent.bench_vllm SETTINGS LOOP``, until stdin ends; SETTINGS is a
:class:`Settings` in JSON. It writes the model's ``config.json`` into the folder and says the
model's size. With the first line it is told the URL of the server that has no bus; it then opens
its transports, waiting for the engines of the others, and says so. After that each line
names a way, and is answered with what one update took, and when its parts were, in seconds on
``time.monotonic()``'s clock, which all processes of a host share:

- ``native``: vLLM's own, over HTTP: its trainer engine, its client, and a pause around that.
- ``bus_native``: the bus, with the same trainer engine, if there is a group of that name.
- ``paused`` (``bus`` is the same) and ``staged``: the bus, with a backend of wavebus's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import anyio.to_thread
import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.plugins import load_general_plugins

import bus.log
from bus.runtime import loop
from bus.runtime.lines import answer, commands
from bus.transfer import World
from trainer_agent.agent import TrainerAgent
from trainer_agent.bench_transfer import BOOT_S, MeasuredAgent
from trainer_agent.bench_update import bus_update
from trainer_agent.demo.policy import Policy, PolicyConfig
from trainer_agent.vllm_infos import native_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.runtime.loop import LoopChoice
    from trainer_agent.how import How
    from trainer_agent.report import UpdateReport

Call: TypeAlias = "tuple[str, float, float]"

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
}
# How vLLM's own trainer engine tells its client, and what wavebus calls that.
_ROUTES: Final = {
    "start_weight_update": "start",
    "update_weights": "update",
    "finish_weight_update": "finish",
    "resume": "resume",
}
_PAUSE: Final = "pause?mode=keep&clear_cache="


@dataclass(frozen=True)
class Settings:
    """What to send, and how.

    Attributes:
        groups: ``bus`` and, if it is to be measured, ``bus_native``: that each engine is alone in.
        bus_device: where weights lie that a backend of wavebus's sends; empty: on ``device``, as
            all others.
    """

    broker: str
    groups: dict[str, str]
    folder: str
    model: str
    device: str
    bus_device: str
    native_engine: str
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


class Weights(WeightSource):  # type: ignore[misc]
    """Tensors by name, as vLLM's trainer engines take them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def metadata(self) -> list[Any]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


class NativeClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """vLLM's own client, which notes when its calls were, and pauses."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.calls: list[Call] = []
        self._version = 0

    def pause(self, *, clear_cache: bool) -> None:
        """Requests are kept."""
        self._post(f"{_PAUSE}{clear_cache}".lower())

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """With a version, as over the bus; vLLM sets it within the same call."""
        self._version += 1
        super().finish_weight_update(weight_version or str(self._version))

    def resume(self) -> None:
        """They go on."""
        self._post("resume")

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        since_s = time.monotonic()
        super()._post(path, json)
        name = "pause" if path.startswith(_PAUSE) else _ROUTES.get(path, path)
        self.calls.append((name, since_s, time.monotonic()))


class Native:
    """vLLM's own way: no bus at all."""

    def __init__(
        self, url: str, engine: str, weights: dict[str, torch.Tensor], *, clear_cache: bool
    ) -> None:
        self._clear_cache = clear_cache
        self._client = NativeClient(url)
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            native_info(engine, {}, rank=0, world=World(0, 2, "127.0.0.1")),
            client=self._client,
            source=Weights(weights),
        )

    def update(self) -> dict[str, Any]:
        """One, with what its calls took."""
        client = self._client
        client.calls.clear()
        since_s = time.monotonic()
        client.pause(clear_cache=self._clear_cache)
        try:
            self._trainer.send_weights()
        finally:
            client.resume()
        until_s = time.monotonic()
        return {
            "since_s": since_s,
            "until_s": until_s,
            "window_ms": (until_s - since_s) * 1000,
            "receive_ms": _received_ms(client.calls),
            "commit_ms": 0.0,
            "calls": client.calls,
        }


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
        return {"since_s": since_s, "until_s": time.monotonic(), **_told(self._agent.last_update)}


def _received_ms(calls: list[Call]) -> float:
    """From the first call that has chunks received to the end of the last."""
    updates = [call for call in calls if call[0] == "update"]
    return (updates[-1][2] - updates[0][1]) * 1000


def _told(report: UpdateReport | None) -> dict[str, Any]:
    assert report is not None, "an update has just been made"
    return {
        "window_ms": report.paused_ms,
        "interrupted": report.interrupted,
        "chunks": report.chunks,
        "verified": report.verified,
        "calls": [],
    }


async def drive(settings: Settings) -> None:
    """Make the model, open the transports, and do what is asked, until stdin ends."""
    config = MODELS[settings.model]
    write_config(config, Path(settings.folder))
    cpu = settings.device == "cpu"
    if not cpu:
        torch.cuda.set_device(settings.device)
    dtype = torch.float32 if cpu else torch.bfloat16
    weights = random_weights(config, settings.device, dtype)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    answer(size_bytes=size_bytes, tensors=len(weights))
    load_general_plugins()  # trainer engines of others come with them
    lines = commands()
    url = await anext(lines)
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
        await ours.wait_for_engines(1, timeout_s=BOOT_S)
        native = await in_thread(
            functools.partial(Native, clear_cache=clear_cache), url, settings.native_engine, weights
        )
        if "bus_native" in settings.groups:
            theirs = TrainerAgent(
                settings.broker, group=settings.groups["bus_native"], name="theirs"
            )
            await stack.enter_async_context(theirs)
            await theirs.wait_for_engines(1, timeout_s=BOOT_S)
            info = await theirs.init_info(settings.native_engine)
            bus_native = await in_thread(BusNative, theirs, info, weights)
        answer(ready=True)
        async for way in lines:
            if way == "native":
                answer(**await in_thread(native.update))
            elif way == "bus_native":
                assert bus_native is not None
                answer(**await in_thread(bus_native.update))
            else:
                how: How = "staged" if way == "staged" else "paused"
                answer(**await bus_update(ours, sent, how=how, clear_cache=clear_cache))


if __name__ == "__main__":
    told, kind = sys.argv[1:]
    bus.log.configure(json=True)
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        loop.run(drive(Settings(**json.loads(told))), loop=cast("LoopChoice", kind))
