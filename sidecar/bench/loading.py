"""The engine of ``bench transfer``: an embedded one under a real sidecar.

``python -m sidecar.bench.loading ADDRESS GROUP FOLDER LOOP``; until stdin ends. It answers
``spans`` with when its receive and load calls were since it was last asked, in seconds on
``time.monotonic()``'s clock, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, cast

import torch

import bus.log
from bus.runtime import loop
from bus.runtime.lines import answer, commands
from sidecar.agent import Sidecar
from sidecar.embedded import EmbeddedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.runtime.loop import LoopChoice
    from sidecar.engine import Chunk


class TimedEngine(EmbeddedEngine):
    """An embedded engine that notes when it received and loaded."""

    spans: list[tuple[float, float]]

    @classmethod
    def of(cls, folder: str) -> TimedEngine:
        engine = cls(folder, host=None, max_num_seqs=1)
        engine.spans = []
        return engine

    async def receive(self, chunk: Chunk) -> None:
        with self._noted():
            await super().receive(chunk)

    async def load(self, seq: int) -> None:
        with self._noted():
            await super().load(seq)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        since_s = time.monotonic()
        yield
        self.spans.append((since_s, time.monotonic()))


async def serve(broker: str, group: str, folder: str) -> None:
    """Join, and tell."""
    engine = TimedEngine.of(folder)
    async with Sidecar(engine, broker=broker, group=group, name="engine-0") as sidecar:
        await sidecar.joined()
        answer(ready=True)
        async for _ in commands():
            answer(spans=engine.spans)
            engine.spans = []


if __name__ == "__main__":
    bus.log.configure(level="warning", json=True)
    torch.set_num_threads(1)  # as `wavebus sidecar` does by default
    address, group_name, checkpoint, kind = sys.argv[1:]
    loop.run(serve(address, group_name, checkpoint), loop=cast("LoopChoice", kind))
