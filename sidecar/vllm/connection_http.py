"""HTTP connections to a vLLM API server.

A session that saw a failure is not used again. A server closes the connection on which it failed a
moment later; a call that takes the connection meanwhile is lost, and its caller can't tell whether
the server received it. So the next call after a failure opens its own connection. Idle connections
are closed before the server closes them.
"""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sidecar.vllm.lora_routes import AdapterRoutes


# Servers close theirs after 5 s (uvicorn's default).
KEEP_ALIVE_S: Final = 2.0


class HttpSessions:
    """Made inside an event loop.

    Args:
        connect_s: how long a server may take to accept one.
    """

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        self._session = self._new()
        self._users: Counter[aiohttp.ClientSession] = Counter()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """For one call and its answer."""
        session = self._session
        self._users[session] += 1
        try:
            yield session
        finally:
            self._users[session] -= 1
            if not self._users[session]:
                del self._users[session]
                if session is not self._session:
                    await session.close()

    def on_failure(self) -> None:
        """A call under way has failed; it and those beside it go on, the next ones begin anew."""
        self._session = self._new()

    async def close(self) -> None:
        """End all of them."""
        for session in {self._session, *self._users}:
            await session.close()

    def _new(self) -> aiohttp.ClientSession:
        # A limit of connections would let waiting calls hold back a resume.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
        )


class HttpConnection:
    """:class:`sidecar.vllm.worker_client.VllmConnection` of an API server."""

    def __init__(
        self, ask: Callable[[str, dict[str, Any]], Awaitable[Any]], adapters: AdapterRoutes
    ) -> None:
        self._ask = ask
        self._adapters = adapters

    async def ask(self, method: str, kwargs: dict[str, Any]) -> Any:
        return await self._ask(method, kwargs)

    async def load_adapter(self, name: str) -> None:
        await self._adapters.load(name)

    async def drop_adapter(self, name: str) -> None:
        await self._adapters.drop(name)
