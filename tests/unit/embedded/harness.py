"""What the tests of the embedded engine share."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from bus.manifest import Manifest, TensorMeta
from sidecar.embedded.engine import EmbeddedEngine
from sidecar.embedded.sampling import SamplingParams
from sidecar.engine import Chunk
from trainer_agent.transfer import make_sender

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping

    from torch import Tensor

    from sidecar.embedded.generation import Generation
    from sidecar.embedded.requests import Delta
    from tests.support.checkpoints import Checkpoint

T = TypeVar("T")

PROMPT = (5, 9, 77, 31, 12)
# A test that waits for what never comes fails, and does not hang.
LIMIT_S = 60.0


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine to its end, in an event loop of its own."""

    async def bounded() -> T:
        return await asyncio.wait_for(scenario, LIMIT_S)

    return asyncio.run(bounded())


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    """Greedy, past any end of sequence."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


@contextlib.asynccontextmanager
async def serving(checkpoint: Checkpoint, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    """An engine over the checkpoint, closed at the end."""
    engine = EmbeddedEngine(checkpoint.folder, **{"host": None, **options})
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def take(generation: Generation, count: int) -> list[Delta]:
    """The next ``count`` deltas."""
    return [await anext(generation) for _ in range(count)]


def manifest_of(weights: Mapping[str, Tensor], *, chunks: int = 1) -> Manifest:
    """A manifest of these tensors, in ``chunks`` chunks of about as many tensors."""
    count = len(weights)
    return Manifest(
        tuple(weights),
        tuple(str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()),
        tuple(tuple(tensor.shape) for tensor in weights.values()),
        tuple(count * (chunk + 1) // chunks for chunk in range(chunks)),
    )


def metas_of(weights: Mapping[str, Tensor]) -> list[TensorMeta]:
    return list(manifest_of(weights).tensors())


class Trainer:
    """Sends weights chunk by chunk over shared memory."""

    def __init__(
        self, engine: EmbeddedEngine, weights: Mapping[str, Tensor], *, chunks: int = 1
    ) -> None:
        self.engine = engine
        self.weights = weights
        self.manifest = manifest_of(weights, chunks=chunks)
        self._sender = make_sender("shm")

    async def begin(self, *, recover: bool = False) -> None:
        """Open, arm and start; the engine must be paused."""
        sizes = [meta.size_bytes for meta in self.manifest.tensors()]
        params = self._sender.open(self._sender.packed_bytes(sizes))
        await self.engine.open_transfer("shm", params)
        self._sender.opened()
        await self.engine.arm(self.manifest)
        await self.engine.start_update(recover=recover)

    def offer(self, seq: int) -> Chunk:
        """Put a chunk where the engine can fetch it."""
        tensors = self.manifest.chunk(seq)
        handle = self._sender.put(seq, [self.weights[meta.name] for meta in tensors])
        return Chunk(seq, "shm", tensors, handle)

    async def update(self, version: int, *, recover: bool = False) -> None:
        """A whole update of a paused engine."""
        await self.begin(recover=recover)
        for seq in range(self.manifest.chunks):
            await self.engine.receive(self.offer(seq))
            await self.engine.load(seq)
        await self.engine.finish_update()
        await self.engine.commit(version)
        self.close()

    def close(self) -> None:
        self._sender.close()
