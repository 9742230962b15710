"""The engine of ``bench transfer``: an embedded one under a real sidecar.

``python -m sidecar.bench.transfer.loading_engine ADDRESS GROUP FOLDER SIZE_BYTES LOOP``; until
stdin ends. It answers ``spans`` with when its receive and load calls were since it was last asked,
in seconds on ``time.monotonic()``'s clock, which all processes of a host share; and ``memcpy`` with
how long a copy of SIZE_BYTES took it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, cast

import torch

import bus.log
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from sidecar.embedded import EmbeddedEngine
from sidecar.sidecar import Sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bus.messages import Verify
    from bus.runtime.event_loop import LoopChoice
    from sidecar.bench.transfer.window import Call
    from sidecar.engine import Chunk


class TimedEmbeddedEngine(EmbeddedEngine):
    """An embedded engine that notes when it received, loaded and swapped.

    Args:
        options: as :class:`sidecar.embedded.EmbeddedEngine` has them.

    Attributes:
        calls: name, begin and end of each, in seconds on ``time.monotonic()``'s clock.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.calls: list[Call] = []

    async def receive(self, chunk: Chunk) -> None:
        with self._noted("receive"):
            await super().receive(chunk)

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        with self._noted("load"):
            await super().load(seq, verify, sums)

    async def swap(self, version: int, *, clear_cache: bool) -> None:
        with self._noted("swap"):
            await super().swap(version, clear_cache=clear_cache)

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        since_s = time.monotonic()
        yield
        self.calls.append((name, since_s, time.monotonic()))


async def serve(broker: str, group: str, folder: str, size_bytes: int) -> None:
    """Join, and tell."""
    engine = TimedEmbeddedEngine(folder, host=None, max_num_seqs=1)
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source).fill_(1)  # touched, or the first copy would pay for that
    async with Sidecar(engine, broker=broker, group=group, name="engine-0") as sidecar:
        await sidecar.joined()
        write_answer(ready=True)
        async for command in read_commands():
            if command == "memcpy":
                since_s = time.monotonic()
                target.copy_(source)
                write_answer(memcpy_ms=(time.monotonic() - since_s) * 1000)
            else:
                write_answer(spans=[(since_s, until_s) for _, since_s, until_s in engine.calls])
                engine.calls = []


if __name__ == "__main__":
    bus.log.configure(level="warning", json=True)
    torch.set_num_threads(1)  # as `wavebus sidecar` does by default
    address, group_name, checkpoint, size, kind = sys.argv[1:]
    event_loop.run(serve(address, group_name, checkpoint, int(size)), loop=cast("LoopChoice", kind))
