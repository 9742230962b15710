"""A request as its caller sees it: deltas as they come, or all of it at the end."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.errors import EngineError
    from sidecar.embedded.requests import Delta


class Generation:
    """An async iterator over the deltas of one request, for one consumer.

    ``done`` is set when the engine has said its last word about the request, read or
    not. Whoever stops reading early calls :meth:`abort`.

    Args:
        request_id: the engine's own name for it.
        choices: how many ends there will be.
        abort: asks the engine to end the request.
    """

    def __init__(self, request_id: str, choices: int, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.done = asyncio.Event()
        self._open = choices
        self._abort = abort
        self._ready: deque[Delta] = deque()
        self._news = asyncio.Event()
        self._error: EngineError | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
            EngineDead: the engine crashed.
        """
        if not self._ready:
            await self._wait()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def ready(self) -> list[Delta]:
        """Everything there is to read, at least one delta; empty when all has been read.

        Raises:
            EngineDead: the engine crashed.
        """
        if not self._ready:
            await self._wait()
        deltas = list(self._ready)
        self._ready.clear()
        return deltas

    async def outputs(self) -> list[Delta]:
        """Read to the end; one delta for each choice, in order, holding all of it.

        Raises:
            EngineDead: the engine crashed.
        """
        merged: dict[int, Delta] = {}
        async for delta in self:
            before = merged.get(delta.index)
            merged[delta.index] = delta if before is None else _joined(before, delta)
        return [merged[index] for index in sorted(merged)]

    def abort(self) -> None:
        """End the request, unless it has ended."""
        if not self.done.is_set():
            self._abort(self.request_id)

    def push(self, delta: Delta) -> None:
        """Called by the engine, in the loop."""
        self._ready.append(delta)
        if delta.finish_reason:
            self._open -= 1
            if not self._open:
                self.done.set()
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """Called by the engine, in the loop, when nothing more will come."""
        self._error = error
        self.done.set()
        self._news.set()

    async def _wait(self) -> None:
        """Until there is something to read, or nothing will come."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self.done.is_set():
                return
            self._news.clear()
            await self._news.wait()


def _joined(first: Delta, second: Delta) -> Delta:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return replace(second, token_ids=first.token_ids + second.token_ids, logprobs=logprobs)
