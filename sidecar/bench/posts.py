"""What peers do: concurrent posts to every engine, with aiohttp and kept connections."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

import aiohttp
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType


class HttpGroup:
    """A client of all endpoints. Rounds are ``/pause`` of all, then ``/resume`` of all."""

    def __init__(self, ports: Iterable[int]) -> None:
        bases = [URL(f"http://127.0.0.1:{port}") for port in ports]
        pause = {"mode": "keep", "clear_cache": "true"}  # what PAUSE_LOCAL carries, too
        self._steps = [
            [(base / "pause").with_query(pause) for base in bases],
            [base / "resume" for base in bases],
        ]
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
        for urls in self._steps:
            await asyncio.gather(*map(self._post, urls))
        took_ms = (time.perf_counter() - since_s) * 1000
        self.cpu_s += time.process_time() - since_cpu_s
        return took_ms

    async def _post(self, url: URL) -> None:
        async with self._session.post(url) as response:
            response.raise_for_status()
            await response.json()
