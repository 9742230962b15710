"""What peers do: concurrent posts to every engine, with aiohttp and kept connections.

As the HTTP clients of RL frameworks do it: one session, an address put together per
call, the pause's arguments as query parameters, the answer's JSON read and its status
checked, all engines in one ``gather``.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType


class HttpGroup:
    """A client of all endpoints. Rounds are ``/pause`` of all, then ``/resume`` of all."""

    def __init__(self, ports: Iterable[int]) -> None:
        self._servers = [f"http://127.0.0.1:{port}" for port in ports]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3600)
        )
        self.cpu_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def round_ms(self) -> float:
        """One round; adds this process's CPU time to :attr:`cpu_s`."""
        since_cpu_s, since_s = time.process_time(), time.perf_counter()
        # What PAUSE_LOCAL carries, too.
        await self._post_all("/pause", {"mode": "keep", "clear_cache": "true"})
        await self._post_all("/resume", None)
        took_ms = (time.perf_counter() - since_s) * 1000
        self.cpu_s += time.process_time() - since_cpu_s
        return took_ms

    async def _post_all(self, route: str, params: dict[str, str] | None) -> dict[str, object]:
        calls = [self._post(server, route, params) for server in self._servers]
        return dict(await asyncio.gather(*calls))

    async def _post(
        self, server: str, route: str, params: dict[str, str] | None
    ) -> tuple[str, object]:
        async with self._session.post(f"{server}{route}", params=params) as response:
            body = await response.json()
            response.raise_for_status()
            return server, body
