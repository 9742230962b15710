"""Asks all routable engines the same, and returns the answers of those that answer in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp

from trainer_agent.rollouts.attempt import Cut, read_bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer_agent.rollouts.engine_pool import EnginePool

_OK: Final = 200
ANSWER_S: Final = 5.0


async def ask_each(
    pool: EnginePool,
    http: aiohttp.ClientSession,
    path: str,
    body: Mapping[str, str] | None = None,
    timeout_s: float = ANSWER_S,
) -> dict[str, bytes]:
    """Returns the bodies of all engines' answers, by the engines' names.

    An engine is left out if its status is not 200, or if it does not answer in time.

    Args:
        pool: the engines.
        http: the client's session.
        path: the route.
        body: the JSON to POST. Default: a GET.
        timeout_s: how long an engine may take, in seconds.
    """
    timeout = aiohttp.ClientTimeout(timeout_s)
    method = "GET" if body is None else "POST"

    async def ask(url: str) -> bytes | None:
        try:
            async with http.request(
                method, url, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                raw = await read_bounded(response)
                return raw if response.status == _OK else None
        except (aiohttp.ClientError, OSError, TimeoutError, Cut):
            return None

    engines = sorted((name, load.route.endpoint) for name, load in pool.router.engines.items())
    answers = await asyncio.gather(*(ask(url + path) for _, url in engines))
    pairs = zip(engines, answers, strict=True)
    return {name: raw for (name, _), raw in pairs if raw is not None}
