"""What the tests of the embedded engine share."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar._embedded.engine import EmbeddedEngine
from sidecar._embedded.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from sidecar._embedded.requests import Delta, Generation
    from tests.support.checkpoints import Checkpoint

T = TypeVar("T")

PROMPT = (5, 9, 77, 31, 12)
# A test that waits for what never comes fails, and does not hang.
LIMIT_S = 120.0


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
