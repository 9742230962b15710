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
import anyio

import bus.log
from bus.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sidecar.vllm.lora_routes import AdapterRoutes


# Servers close theirs after 5 s (uvicorn's default).
KEEP_ALIVE_S: Final = 2.0
_ASK_EVERY_S: Final = 0.5
# How often a start says that it waits for the server.
_WARN_EVERY_S: Final = 10.0
SERVER_ERROR: Final = 500


class HttpSessions:
    """Made inside an event loop.

    Args:
        connect_s: how long a server may take to accept one.
        api_key: what the server asks its clients for, or empty.
    """

    def __init__(self, connect_s: float, api_key: str = "") -> None:
        self._connect_s = connect_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
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
            headers=self._headers,
        )


class HttpConnection:
    """:class:`sidecar.vllm.worker_client.VllmConnection` of an API server."""

    def __init__(
        self, post: Callable[[str, Any], Awaitable[dict[str, Any]]], adapters: AdapterRoutes
    ) -> None:
        self._post = post
        self._adapters = adapters

    async def ask(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        body = {"method": method, "kwargs": kwargs or {}}
        return (await self._post("/collective_rpc", body)).get("results")

    async def load_adapter(self, name: str) -> None:
        await self._adapters.load(name)

    async def drop_adapter(self, name: str) -> None:
        await self._adapters.drop(name)


async def wait_until_healthy(
    health: Callable[[], Awaitable[int]], url: str, limit_s: float
) -> None:
    """Return when the server is healthy; log what is waited for, for at most ``limit_s``."""
    last = "nothing was heard"
    warn_s = 0.0
    with anyio.move_on_after(limit_s):
        while True:
            try:
                status = await health()
            except (aiohttp.ClientError, TimeoutError) as error:
                last = str(error) or type(error).__name__
            else:
                if status < SERVER_ERROR:
                    return
                last = f"/health answers {status}"
            if anyio.current_time() >= warn_s:
                warn_s = anyio.current_time() + _WARN_EVERY_S
                bus.log.logger().warning("engine_not_healthy", url=url, detail=last)
            await anyio.sleep(_ASK_EVERY_S)
    raise EngineError(f"no healthy server at {url} within {limit_s:g} s: {last}")
