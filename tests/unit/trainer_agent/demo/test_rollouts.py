"""Rollouts: streamed, and of an engine that is paused when they are asked for."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tests.support.generating import PAUSED, generating, streamed
from trainer_agent.demo import task
from trainer_agent.demo.rollouts import RolloutPool

REJECTED = 2


def tokens() -> list[dict[str, object]]:
    """A whole answer to a stream, token by token; its end has the versions."""
    events: list[dict[str, object]] = []
    for token in range(task.MAX_TOKENS):
        last = token == task.MAX_TOKENS - 1
        choice = {
            "index": 0,
            "token_ids": [token],
            "logprobs": {"content": [{"logprob": -float(token)}]},
            "finish_reason": "length" if last else None,
            "weight_versions": [{"version": "3", "start": 0, "end": 5}] if last else None,
        }
        events.append({"choices": [choice]})
    return events


def test_what_a_pause_rejects_is_sent_again() -> None:
    """It counts as one request, and nothing is lost."""
    rejected = 0

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal rejected
        if rejected < REJECTED:
            rejected += 1
            if rejected % 2:
                return web.json_response(PAUSED, status=503)
            return await streamed(request, PAUSED)
        return await streamed(request, *tokens())

    async def scenario() -> None:
        async with generating(generate) as url:
            await asyncio.to_thread(take_one, url)

    def take_one(url: str) -> None:
        with RolloutPool([url], group_size=1, streams=1, ahead=1, seed=1) as pool:
            [[rollout]] = pool.take(1)
            assert len(rollout.response_ids) == task.MAX_TOKENS
            assert rollout.response_ids == tuple(range(task.MAX_TOKENS))
            assert rollout.logprobs == tuple(-float(token) for token in range(task.MAX_TOKENS))
            assert rollout.versions[:6] == (3, 3, 3, 3, 3, 0)
        assert (rejected, pool.counts.lost) == (REJECTED, 0)
        assert pool.counts.longest_token_gap_ms > 0

    asyncio.run(asyncio.wait_for(scenario(), 30))
