"""The program of a trainer that updates embedded engines, over the bus or without it.

Without a bus the trainer calls each engine's methods over a connection, one by one: arm,
pause, then put, receive and load of each chunk, finish, resume.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import aiohttp
import torch

from bus._weight_transfer.allocation import ALONE, World
from bus._weight_transfer.registry import make_sender
from bus.errors import WavebusError
from bus.operations import ArmManifest, LoadChunk, Open, ReceiveChunk, Start
from lab.bench.programs.broadcast import MemoryCopy
from lab.bench.programs.call_times import CallTimes
from lab.bench.programs.measured_agent import BOOT_S, MeasuredAgent, TimedSender
from lab.network import Network, PolicyConfig, save_network
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.shared_memory import share_memory
from trainer_agent._weights.source import tensor_metas

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AsyncExitStack

    from trainer_agent._options import How

Shape: TypeAlias = Literal["large", "small", "mixture"]
End: TypeAlias = "tuple[asyncio.StreamReader, asyncio.StreamWriter]"

_FLOAT_BYTES: Final = 4


def few_large(megabytes: int) -> PolicyConfig:
    """Returns the sizes of a dense model: nearly all in large tensors of two layers."""
    layers, head_dim = 2, 64
    floats = megabytes * 1_000_000 / _FLOAT_BYTES / layers
    # Four matrices of attention and three of twice that size: ten squares of the width.
    heads = max(1, round((floats / 10) ** 0.5 / head_dim))
    hidden = heads * head_dim
    return PolicyConfig(
        hidden_size=hidden,
        intermediate_size=max(1, round((floats - 4 * hidden**2) / (3 * hidden))),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
    )


def many_small(tensors: int) -> PolicyConfig:
    """Returns the sizes of a mixture of experts with about so many small tensors."""
    layers = max(1, tensors // 1000)
    # Three tensors are in no layer, nine in each layer, and three in each expert.
    experts = ((tensors - 3) / layers - 9) / 3
    return PolicyConfig(
        hidden_size=16,
        num_layers=layers,
        num_heads=1,
        head_dim=16,
        experts=max(2, round(experts)),
        expert_size=8,
    )


def mixture(megabytes: int) -> PolicyConfig:
    """Returns the sizes of a mixture of 16 experts; fast, as a token needs two."""
    layers, experts, hidden = 4, 16, 256
    floats = megabytes * 1_000_000 / _FLOAT_BYTES
    return PolicyConfig(
        vocab_size=512,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=2048,
        head_std=0.2,
        experts=experts,
        expert_size=max(8, round(floats / (layers * experts * 3 * hidden))),
    )


# By a model's shape, a function from an amount (MB in float32; for `small`, tensors) to its sizes.
MODELS: Final = {"large": few_large, "small": many_small, "mixture": mixture}


class DirectTrainer:
    """Updates engines without a bus, by calling their methods, for comparison."""

    def __init__(
        self, ends: Sequence[End], backend: str, plan: UpdatePlan, *, packed: bool
    ) -> None:
        self._ends = ends
        self._backend = backend
        self._plan = plan
        self._timed = TimedSender(make_sender(backend, packed=packed))
        self._version = 0

    async def open(self) -> None:
        """Opens the transport at the trainer and at all engines."""
        sender, count = self._timed, len(self._ends)
        world, places = ALONE, [(0, 1, 0)] * count
        if sender.is_collective:
            world = World(1, 1 + count, "127.0.0.1")
            places = [(1, world.size, 1 + index) for index in range(count)]
        size_bytes = self._plan.buffer_bytes(sender.inner)
        params = await asyncio.to_thread(sender.open, size_bytes, world)
        opening = [
            self._ask(end, "perform", Open("", self._backend, params, *place))
            for end, place in zip(self._ends, places, strict=True)
        ]
        await asyncio.gather(*opening, asyncio.to_thread(sender.meet))
        sender.on_opened()

    async def update(self, tensors: Sequence[torch.Tensor], *, clear_cache: bool) -> dict[str, Any]:
        """Makes one update of all engines in a pause; ``tensors`` are in the plan's order."""
        plan = self._plan
        self._version += 1
        timed = self._timed
        timed.begin()
        since_s = time.monotonic()
        await self._all("perform", ArmManifest(plan.manifest))
        await self._all("pause", "keep", clear_cache=clear_cache)
        await self._all("perform", Start())
        left = iter(tensors)
        for seq in range(plan.chunks):
            handle = timed.put(seq, list(itertools.islice(left, plan.tensor_count(seq))))
            chunk = ReceiveChunk(seq, self._backend, handle)
            await asyncio.gather(
                self._all("perform", chunk), asyncio.to_thread(timed.transfer, seq)
            )
            await self._all("perform", LoadChunk(seq))
            timed.on_taken(seq)
        await self._all("finish", self._version)
        await self._all("resume")
        until_s = time.monotonic()
        return {"since_s": since_s, "until_s": until_s, "receive_ms": timed.receive_ms()}

    def close(self) -> None:
        """Closes the connections and the sender."""
        for _, writer in self._ends:
            writer.close()
        self._timed.close()

    async def _all(self, call: str, *arguments: object, **options: object) -> None:
        """Makes one call to all engines at once."""
        await asyncio.gather(*(self._ask(end, call, *arguments, **options) for end in self._ends))

    async def _ask(self, end: End, call: str, *arguments: object, **options: object) -> None:
        reader, writer = end
        writer.write(pickle.dumps((call, arguments, options)).hex().encode() + b"\n")
        said = (await reader.readline() or b"it is gone\n").decode().strip()
        if said:
            raise WavebusError(f"{call}: {said}")


class HttpTrainer:
    """Updates engines through a gateway, as clients of vLLM's ``nccl`` do.

    All tensors are in one call, and one broadcast by wavebus's gloo takes the place of NCCL's.

    Args:
        url: the gateway's URL.
        plan: the tensors of an update, in one chunk.
    """

    def __init__(self, url: str, plan: UpdatePlan) -> None:
        self._http = aiohttp.ClientSession(url)
        self._sender = make_sender("gloo", buffers=1)
        self._size_bytes = plan.buffer_bytes(self._sender)
        self._described = {
            "names": [each.name for each in plan.metas],
            "dtype_names": [each.dtype for each in plan.metas],
            "shapes": [list(each.shape) for each in plan.metas],
        }
        self._calls = CallTimes()
        self._version = 0

    async def open(self) -> None:
        """Makes a communicator with all engines."""
        async with self._http.get("/get_world_size", raise_for_status=True) as answer:
            size = 1 + (await answer.json())["world_size"]
        world = World(0, size, "127.0.0.1")
        params = await asyncio.to_thread(self._sender.open, self._size_bytes, world)
        info = {"rank_offset": 1, "world_size": size, "params": params.hex()}
        await asyncio.gather(
            self._post("init_weight_transfer_engine", {"init_info": info}),
            asyncio.to_thread(self._sender.meet),
        )

    async def update(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Makes one update; ``tensors`` are in the plan's order."""
        self._version += 1
        self._calls.take()
        since_s = time.monotonic()
        await self._post("start_weight_update")
        await asyncio.gather(
            self._post("update_weights", {"update_info": self._described}),
            asyncio.to_thread(self._send, tensors),
        )
        await self._post("finish_weight_update", {"weight_version": str(self._version)})
        return {"since_s": since_s, "until_s": time.monotonic(), "calls": self._calls.take()}

    def _send(self, tensors: Sequence[torch.Tensor]) -> None:
        with self._calls.record("put"):
            self._sender.put(0, tensors)
        with self._calls.record("send"):
            self._sender.transfer(0)

    async def _post(self, route: str, body: dict[str, Any] | None = None) -> None:
        with self._calls.record(route):
            async with self._http.post(f"/{route}", json=body) as answer:
                if not answer.ok:
                    raise WavebusError(f"{route}: {await answer.text()}")

    async def close(self) -> None:
        """Closes the connections and the sender."""
        await self._http.close()
        self._sender.close()


class EmbeddedTrainer:
    """Sends a model to embedded engines again and again, without training it."""

    def __init__(
        self, stack: AsyncExitStack, agent: MeasuredAgent, model: Network, *, lent: bool
    ) -> None:
        self._stack = stack
        self._agent = agent
        self._model = model
        self._packed = not lent
        self._source = as_source(model)
        metas = tensor_metas(self._source.metadata())
        self._plan = UpdatePlan.of_source(metas, chunk_bytes=agent.chunk_bytes)
        self._copy = MemoryCopy.of_bytes(self._plan.size_bytes)
        self.hello = {"size_bytes": self._plan.size_bytes, "tensors": len(metas)}

    async def open(
        self, engines: int, backend: str = "", sockets: Sequence[str] = (), gateway: str = ""
    ) -> None:
        """Waits for engines on the bus, and connects to those that others reach.

        Args:
            engines: how many engines of this trainer's group to wait for.
            backend: the backend of the engines without a bus.
            sockets: the sockets of the engines without a bus.
            gateway: the URL of the gateway of another group; empty: there is none.
        """
        await self._agent.wait_for_engines(engines, timeout_s=BOOT_S)
        if sockets:
            ends = [await asyncio.open_unix_connection(path) for path in sockets]
            self._direct = DirectTrainer(ends, backend, self._plan, packed=self._packed)
            self._stack.callback(self._direct.close)
            await self._direct.open()
        if gateway:
            self._http = HttpTrainer(gateway, self._plan)
            self._stack.push_async_callback(self._http.close)
            await self._http.open()

    def memcpy_ms(self) -> float:
        """Copies the model's number of bytes within CPU memory; returns the time in ms."""
        return self._copy.took_ms()

    async def update(
        self, how: How | Literal["native", "gateway"], *, clear_cache: bool = True
    ) -> dict[str, Any]:
        """Makes one update, and returns its times.

        ``native`` is without the bus (:meth:`DirectTrainer.update`), ``gateway`` over HTTP
        (:meth:`HttpTrainer.update`), and the other ways use the bus
        (:meth:`MeasuredAgent.measured_update`).
        """
        if how == "native":
            tensors = [tensor.detach() for _, tensor in self._source]
            return await self._direct.update(tensors, clear_cache=clear_cache)
        if how == "gateway":
            return await self._http.update([tensor.detach() for _, tensor in self._source])
        return await self._agent.measured_update(self._model, how=how, clear_cache=clear_cache)


async def embedded_trainer(
    stack: AsyncExitStack,
    broker: str,
    group: str,
    folder: str,
    *,
    shape: Shape,
    amount: int,
    backend: str,
    lent: bool,
    **options: Any,
) -> EmbeddedTrainer:
    """Makes a trainer with a model, which becomes the owner of its group.

    Args:
        stack: ends the agent.
        broker: the broker's address.
        group: the group of the engines on the bus.
        folder: where to write a checkpoint of the same shape with other weights.
        shape: the kind of model, a key of ``MODELS``.
        amount: the model's size in MB; for ``small``, the number of its tensors.
        backend: the transfer backend's name.
        lent: True keeps the model in shared memory, from where it is sent without a copy.
        options: more arguments of the agent.
    """
    torch.set_num_threads(1)  # a core for the trainer, one for the engine
    config = MODELS[shape](amount)
    save_network(Network(config, seed=1), Path(folder))
    model = Network(config, seed=2)
    if lent:
        share_memory(model)
    agent = MeasuredAgent(broker, group=group, backend=backend, packed=not lent, **options)
    await stack.enter_async_context(agent)
    return EmbeddedTrainer(stack, agent, model, lent=lent)
