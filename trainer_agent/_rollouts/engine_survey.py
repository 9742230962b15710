"""Sends one request to all routable engines; asks the broker for the number of workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp

from bus.messages import PlanTransfer, TransferPlan
from trainer_agent._rollouts.attempt import Cut, read_bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer_agent._connection import Connection
    from trainer_agent._rollouts.engine_pool import EnginePool

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

    Leaves out engines whose status is not 200, and those that do not answer in time.

    Args:
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


async def count_workers(connection: Connection, *, include_dp: bool) -> int:
    """Returns how many workers would join a new transport; see ``RolloutClient.count_workers``."""
    plan = await connection.ask(PlanTransfer(), TransferPlan)
    if include_dp:
        return plan.world_size - 1
    first_of = {each.dp_group: each.name for each in reversed(await connection.engines())}
    bounds = sorted(plan.first_ranks.values())
    end_of = dict(zip(bounds, [*bounds[1:], plan.world_size], strict=True))
    firsts = plan.first_ranks.keys() & first_of.values()
    return sum(end_of[rank] - rank for rank in map(plan.first_ranks.__getitem__, firsts))
