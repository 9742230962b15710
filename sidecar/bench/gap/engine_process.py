"""An embedded engine of ``bench gap``: a process that serves it, with a sidecar or without.

``python -m sidecar.bench.gap.engine_process SETTINGS LOOP``, until stdin ends; SETTINGS is a
:class:`Settings` in JSON. Says the engine's ``url`` when it takes requests. ``swap`` answers with
how long its last swap took, and ``sums`` with the checksums of the weights that are served.

Without a broker there is no sidecar: the engine's own library is called, by whoever connects to
``port``. Each line there is a call, each answer a line: ``{}``, or ``{"error": "why"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

import bus.log
from bus.errors import EngineError, WavebusError
from bus.manifest import Manifest
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from bus.weight_transfer.allocation import RankAssignment
from bus.weight_transfer.checksum import checksums
from sidecar.bench.transfer.loading_engine import TimedEmbeddedEngine
from sidecar.embedded.parallel.options import DataParallel
from sidecar.engine import Chunk
from sidecar.sidecar import Sidecar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.runtime.event_loop import LoopChoice

_LINE_BYTES = 1 << 24  # a manifest of all tensors is one


@dataclass(frozen=True)
class GapEngineSettings:
    """What to start.

    Attributes:
        group: the one that the engine is in; on the bus, if there is a ``broker``.
        dp_rank, dp_size, master: of a rank in lockstep; alone, ``dp_size`` is 1.
        step_ms: a step takes at least so long.
    """

    folder: str
    group: str
    max_num_seqs: int
    broker: str = ""
    dp_rank: int = 0
    dp_size: int = 1
    master: str = ""
    step_ms: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def dp(self) -> DataParallel | None:
        """Which rank it is, of a group."""
        if self.dp_size == 1:
            return None
        return DataParallel(
            self.dp_size,
            self.dp_rank,
            self.master,
            self.group,
            broker=self.broker,
            bus_group=self.group,
        )


class GapEngine(TimedEmbeddedEngine):
    """One whose weights can be looked at."""

    def sums(self) -> tuple[int, ...]:
        """Of each parameter, between two steps."""

        def look() -> tuple[int, ...]:
            return checksums(torch, list(core.model.parameters.values()), "full")

        core = self._started()
        return core.call(look).result()

    def swap_ms(self) -> float:
        """Of the last swap's call; of ranks in lockstep the wait for each other is in it."""
        times = [until_s - since_s for name, since_s, until_s in self.calls if name == "swap"]
        self.calls.clear()
        return times[-1] * 1000


class DirectEngine:
    """The engine's library, for a trainer in another process that knows no bus."""

    def __init__(self, engine: GapEngine) -> None:
        self._engine = engine
        self._manifest: Manifest | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection's calls, until it ends."""
        while line := await reader.readline():
            said: dict[str, str] = {}
            try:
                await self._call(json.loads(line))
            except WavebusError as error:
                said = {"error": str(error)}
            writer.write(json.dumps(said).encode() + b"\n")
        writer.close()

    async def _call(self, request: dict[str, Any]) -> None:
        engine = self._engine
        match request["call"]:
            case "open":
                place = RankAssignment(**request["place"])
                await engine.open_transfer(
                    request["backend"], bytes.fromhex(request["params"]), place
                )
            case "arm":
                self._manifest = msgspec.convert(request["manifest"], Manifest)
                await engine.arm(self._manifest)
            case "pause":
                await engine.pause("keep", clear_cache=request["clear_cache"])
            case "start":
                await engine.start_update(recover=False)
            case "receive":
                assert self._manifest is not None, "arm comes first"
                seq = request["seq"]
                handle = bytes.fromhex(request["handle"])
                tensors = self._manifest.chunk(seq)
                await engine.receive(Chunk(seq, request["backend"], tensors, handle))
            case "load":
                await engine.load(request["seq"])
            case "finish":
                await engine.finish_update()
                await engine.commit(request["version"])
            case "resume":
                await engine.resume()
            case other:
                raise EngineError(f"no call {other!r}")


@contextlib.asynccontextmanager
async def on_the_bus(
    engine: GapEngine, settings: GapEngineSettings
) -> AsyncIterator[dict[str, object]]:
    """With a sidecar; what is told of it."""
    async with Sidecar(
        engine,
        broker=settings.broker,
        group=settings.group,
        name=f"{settings.group}-{settings.dp_rank}",
        dp_group=settings.group if settings.dp_size > 1 else None,
    ) as sidecar:
        await sidecar.joined()
        assert sidecar.info is not None
        yield {"url": sidecar.info.endpoint}


@contextlib.asynccontextmanager
async def alone(engine: GapEngine) -> AsyncIterator[dict[str, object]]:
    """Without one."""
    url = (await engine.start()).endpoint
    direct = await asyncio.start_server(
        DirectEngine(engine).serve, "127.0.0.1", 0, limit=_LINE_BYTES
    )
    try:
        yield {"url": url, "port": direct.sockets[0].getsockname()[1]}
    finally:
        direct.close()
        await engine.close()


async def serve(settings: GapEngineSettings) -> None:
    """Serve, and tell."""
    engine = GapEngine(
        settings.folder,
        max_num_seqs=settings.max_num_seqs,
        dp=settings.dp,
        step_ms=settings.step_ms,
    )
    serving = on_the_bus(engine, settings) if settings.broker else alone(engine)
    async with serving as answer:
        write_answer(**answer)
        async for command in read_commands():
            if command == "sums":
                write_answer(sums=await asyncio.to_thread(engine.sums))
            else:
                write_answer(swap_ms=engine.swap_ms())


if __name__ == "__main__":
    text, kind = sys.argv[1:]
    bus.log.configure(level="warning", json=True)
    torch.set_num_threads(1)  # as `wavebus sidecar` does by default
    event_loop.run(serve(GapEngineSettings(**json.loads(text))), loop=cast("LoopChoice", kind))
