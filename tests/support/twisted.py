"""An embedded engine whose loader puts rows of a query projection in each other's places.

Every byte arrives as it was sent, and checksums say so; but what is served is another model.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine
from tests.support.checkpoints import HEAD_DIM
from tests.support.steps import ByStep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.operations import LoadChunk, ReceiveChunk
    from sidecar.engine import EngineInfo
    from tests.support.checkpoints import Checkpoint

TENSOR = "model.layers.0.self_attn.q_proj.weight"


class TwistedEngine(ByStep, EmbeddedEngine):
    """``twists``: loads from now on are wrong. ``says_abort``: its probes need a pause that ends
    requests, as those of a vLLM do; or so it says."""

    twists = False
    says_abort = False
    _has_it = False

    async def start(self) -> EngineInfo:
        info = await super().start()
        return replace(info, canary="abort") if self.says_abort else info

    async def on_receive(self, chunk: ReceiveChunk) -> None:
        await self.proceed(chunk)
        self._has_it = any(name == TENSOR for name, _ in self._update()._chunks.take(chunk.seq))

    async def on_load(self, chunk: LoadChunk) -> None:
        await self.proceed(chunk)
        core = self._core
        assert core is not None
        if self.twists and self._has_it:
            rows = core.model.parameters[TENSOR]
            core.call(lambda: rows.copy_(rows.roll(HEAD_DIM, 0))).result()


@contextlib.asynccontextmanager
async def twistable(checkpoint: Checkpoint, broker: str, name: str) -> AsyncIterator[TwistedEngine]:
    """One that does what is right so far, under a sidecar, joined."""
    engine = TwistedEngine(checkpoint.folder, host=None)
    async with Sidecar(engine, broker=broker, group="policy", name=name) as sidecar:
        await sidecar.joined()
        yield engine
