"""The program of an embedded engine that records its calls, with a sidecar or without.

Without a broker there is no sidecar: the trainer then calls the engine's methods over a Unix
socket.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

import bus.log
from bus._vllm import payloads as vllm_payloads
from bus._weight_transfer.checksum import checksums
from bus._weight_transfer.formats import BroadcastChunk, encode
from bus._weight_transfer.gloo import GlooReceiver
from bus._weight_transfer.packing import packed_offsets
from bus._weight_transfer.registry import register_receiver
from bus.errors import WavebusError
from bus.operations import Finish, LoadChunk, ReceiveChunk
from lab.bench.programs.broadcast import MemoryCopy
from lab.bench.programs.call_times import CallTimes
from sidecar._embedded.parallel.options import DataParallel
from sidecar._sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from pathlib import Path

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import RankAssignment
    from bus.operations import Done, UpdateOperation

_LINE_BYTES: Final = 1 << 24  # a line may be a manifest of all tensors


class ClientReceiver(GlooReceiver):
    """Receives over gloo what a client of vLLM's routes sends, as ``nccl`` does in vLLM.

    :class:`lab.bench.programs.embedded_trainer.HttpTrainer` is the other end.
    """

    def open(self, params: bytes, place: RankAssignment) -> None:
        """Joins the client's communicator, whose number only the bus has given."""
        info = vllm_payloads.decode_info(params)
        super().open(bytes.fromhex(info["params"]), replace(place, communicator=0))

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        """Receives all tensors of a call; vLLM's client says nothing of its buffers."""
        del handle
        return super().receive(tensors, encode(BroadcastChunk(packed_offsets(tensors)[-1])))


class TimedEngine(EmbeddedEngine):
    """An embedded engine that records when its operations run."""

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.hello: dict[str, Any] = {}
        self._calls = CallTimes()
        self.taken_calls = self._calls.take
        self._copy: MemoryCopy | None = None

    async def perform(self, operation: UpdateOperation) -> Done:
        """Carries out an operation, and records the call by the operation's name."""
        with self._calls.record(str(operation.__struct_config__.tag)):
            done = await super().perform(operation)
        backend = operation.backend if isinstance(operation, ReceiveChunk) else ""
        if isinstance(operation, ReceiveChunk) and vllm_payloads.is_loaded_on_receipt(backend):
            await self.perform(LoadChunk(operation.seq, staged=operation.staged))
        return done

    async def finish(self, version: int) -> None:
        """Finishes and commits an update in one call, as a trainer without a bus does."""
        await self.perform(Finish())
        await self.commit(version)

    def swap_ms(self) -> float:
        """Returns how long the last swap took, with the wait for peer ranks, in ms."""
        swaps = [(since, until) for name, since, until in self.taken_calls() if name == "swap"]
        return (swaps[-1][1] - swaps[-1][0]) * 1000

    async def sums(self) -> tuple[int, ...]:
        """Returns checksums of all parameters, computed between two steps."""

        def look() -> tuple[int, ...]:
            return checksums(list(core.model.parameters.values()), "full")

        core = self._started()
        return await asyncio.wrap_future(core.call(look))

    def memcpy_ms(self, size_bytes: int) -> float:
        """Copies this many bytes once in CPU memory; returns the time in ms."""
        self._copy = self._copy or MemoryCopy.of_bytes(size_bytes)
        return self._copy.took_ms()


async def serve_calls(
    engine: TimedEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Executes an engine's methods for a trainer in another process that uses no bus.

    Each line is a call: a method's name and its arguments, pickled, in hexadecimal digits. Each
    answer is a line: empty, or the error's text.
    """
    while line := await reader.readline():
        name, arguments, options = pickle.loads(bytes.fromhex(line.decode()))  # noqa: S301 - ours
        said = ""
        try:
            await getattr(engine, name)(*arguments, **options)
        except WavebusError as error:
            said = str(error)
        writer.write(said.encode() + b"\n")
    writer.close()


async def embedded_engine(
    stack: AsyncExitStack,
    folder: str,
    group: str,
    *,
    broker: str = "",
    socket: str = "",
    rank: int = 0,
    ranks: int = 1,
    master: str = "",
    **options: Any,
) -> TimedEngine:
    """Runs an embedded engine; the process's first answer has the engine's ``url``.

    Args:
        stack: ends the engine.
        folder: the checkpoint's folder.
        group: the engine's group, on the bus if there is a broker.
        broker: the broker's address; empty: the engine has no sidecar.
        socket: path of the Unix socket for calls without a bus.
        rank: the rank in a DP group; of an engine alone, a part of its name.
        ranks: how many ranks the DP group has; 1: the engine is alone.
        master: ``host:port`` at which the ranks meet.
        options: more arguments of :class:`sidecar._embedded.EmbeddedEngine`.
    """
    bus.log.configure(level="warning", json=True)
    register_receiver(vllm_payloads.native_name("nccl"), ClientReceiver)
    torch.set_num_threads(1)  # as `wavebus sidecar` does by default
    if ranks > 1:
        options["dp"] = DataParallel(ranks, rank, master, group, broker=broker, bus_group=group)
    engine = TimedEngine(folder, **options)
    if not broker:
        engine.hello = {"url": (await engine.start()).endpoint}
        stack.push_async_callback(engine.close)
        calls = partial(serve_calls, engine)
        direct = await asyncio.start_unix_server(calls, socket, limit=_LINE_BYTES)
        stack.callback(direct.close)
        return engine
    sidecar = await stack.enter_async_context(
        Sidecar(
            engine,
            broker=broker,
            group=group,
            name=f"{group}-{rank}",
            dp_group=group if ranks > 1 else None,
        )
    )
    await sidecar.joined()
    assert sidecar.info is not None
    engine.hello = {"url": sidecar.info.endpoint}
    return engine
