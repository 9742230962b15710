"""An embedded engine on a bus, and whether it serves the weights that it should."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint

PROMPT = (5, 9, 77, 31, 12)
TOKENS = 16


@contextlib.asynccontextmanager
async def an_engine(
    checkpoint: Checkpoint, broker: str, name: str
) -> AsyncIterator[EmbeddedEngine]:
    """Under a sidecar, joined."""
    engine = EmbeddedEngine(checkpoint.folder, host=None)
    async with Sidecar(engine, broker=broker, group="policy", name=name) as sidecar:
        await sidecar.joined()
        yield engine


async def greedy(engine: EmbeddedEngine) -> tuple[list[int], int]:
    """Tokens, and the version that the last one is from."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    deltas = [delta async for delta in engine.generate(PROMPT, params)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[-1].weight_versions[-1].version


async def assert_serve(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], version: int, *engines: EmbeddedEngine
) -> None:
    """These weights, under this version; and so none of them is paused."""
    expected = checkpoint.greedy(weights, PROMPT, TOKENS)
    for engine in engines:
        assert await greedy(engine) == (expected, version)
