"""Asking for several things at once, in a given order, without waiting for answers in between.

What is asked of the bus is sent before its answer is waited for: so tasks that are started one
after the other ask one after the other.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from anyio.abc import TaskGroup

    from bus.messages import GroupAck, Message, WeightChunkMeta

Step: TypeAlias = "Callable[[Message], Coroutine[object, object, GroupAck]]"


@asynccontextmanager
async def together() -> AsyncIterator[TaskGroup]:
    """A task group that raises what went wrong first, and not a group of it."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise first_of(group) from group


async def in_turn(*asks: Callable[[], Coroutine[object, object, object]]) -> None:
    """Ask for all, in this order; return when all are answered."""
    async with together() as tasks:
        for ask in asks:
            tasks.start_soon(ask)


@asynccontextmanager
async def announced(step: Step, meta: WeightChunkMeta) -> AsyncIterator[None]:
    """Engines are told of a chunk before the block; it is applied when that ends, in which the
    word that it is sent must follow."""
    async with together() as tasks:
        tasks.start_soon(step, meta)
        await anyio.lowlevel.checkpoint()  # it is on its way
        yield


def first_of(error: BaseException) -> BaseException:
    """What went wrong first; chunks under way fail with it, for the same reason."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
