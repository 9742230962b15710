"""Rollouts of an engine that is paused when they are asked for."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tests.support.generating import PAUSED, generating
from trainer_agent.demo import task
from trainer_agent.demo.rollouts import RolloutPool

REJECTED = 2


def test_what_a_pause_rejects_is_sent_again() -> None:
    """It counts as one request, and nothing is lost."""
    rejected = 0

    async def generate(_: web.Request) -> web.Response:
        nonlocal rejected
        if rejected < REJECTED:
            rejected += 1
            return web.json_response(PAUSED, status=503)
        tokens = [*range(task.MAX_TOKENS)]
        entries = {"content": [{"logprob": -0.5} for _ in tokens]}
        choice = {"token_ids": tokens, "finish_reason": "length", "logprobs": entries}
        return web.json_response({"choices": [choice]})

    async def scenario() -> None:
        async with generating(generate) as url:
            await asyncio.to_thread(take_one, url)

    def take_one(url: str) -> None:
        with RolloutPool([url], group_size=1, streams=1, ahead=1, seed=1) as pool:
            [[rollout]] = pool.take(1)
            assert len(rollout.response_ids) == task.MAX_TOKENS
        assert (rejected, pool.counts.lost) == (REJECTED, 0)

    asyncio.run(asyncio.wait_for(scenario(), 30))
