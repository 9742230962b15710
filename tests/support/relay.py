"""A TCP server on loopback that carries each connection on to somewhere else."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self


class Relay(ABC):
    """What proxies of the tests have in common, for the length of an ``async with``."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._closing = False

    @property
    def address(self) -> str:
        """Where peers connect to."""
        assert self._server is not None
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._closing = True
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            writer.transport.abort()  # the task may have been cancelled before its first step

        task.add_done_callback(on_done)

    @abstractmethod
    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until it ends."""
