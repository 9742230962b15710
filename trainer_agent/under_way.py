"""An update that goes on while the trainer does."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class _Update(Protocol):
    def __call__(self, *, on_sent: Callable[[], None]) -> Coroutine[Any, Any, int]: ...


async def until_sent(update: _Update, *, at_once: bool) -> asyncio.Task[int]:
    """Begin it, and return it as soon as its source's tensors may change: ``at_once``, if they
    may already. What fails before, is raised; who is cancelled before, gives it up."""
    sent = asyncio.Event()
    task = asyncio.ensure_future(update(on_sent=sent.set))
    if at_once:
        return task
    waiting = asyncio.ensure_future(sent.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        await given_up(task)
        raise
    finally:
        waiting.cancel()
    if not sent.is_set():
        await task  # it has failed; or is another rank's, which has sent its part
    return task


async def given_up(task: asyncio.Task[int]) -> None:
    """Return when it has ended, one way or the other."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
