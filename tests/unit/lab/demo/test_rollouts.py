"""Rollouts of the demo: of an engine that is paused when they are asked for, or that dies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from bus.errors import WavebusError
from bus.messages import RequestLimits
from lab.bench.programs.stub_engines import StubEngine
from lab.demo import task
from lab.demo.learner import GrpoConfig
from lab.demo.processes import GROUP
from lab.demo.rollouts import RolloutPool
from sidecar import Sidecar
from sidecar.engine import EngineInfo
from tests.support.broker import a_broker
from tests.support.generating import PAUSED, generating, streamed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Serving(StubEngine):
    """Its requests go to a URL of the test's."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def start(self) -> EngineInfo:
        limits = RequestLimits(vocab_size=task.MAX_TOKENS, max_model_len=64, slots=8)
        return EngineInfo("stub", "test", "none", 0, 1, 1, ("shm",), self._endpoint, limits=limits)


def tokens() -> list[dict[str, object]]:
    """A whole answer to a stream, token by token; its end has the versions."""
    events: list[dict[str, object]] = []
    for token in range(task.MAX_TOKENS):
        last = token == task.MAX_TOKENS - 1
        spans = [{"version": "3", "start": 0, "end": 5}, {"version": "4", "start": 5, "end": 17}]
        choice = {
            "index": 0,
            "token_ids": [token],
            "logprobs": {"content": [{"logprob": -float(token)}]},
            "finish_reason": "length" if last else None,
            "weight_versions": spans if last else None,
        }
        events.append({"choices": [choice]})
    return events


def run_pool(
    generate: Callable[[web.Request], Awaitable[web.StreamResponse]],
    use: Callable[[RolloutPool], None],
) -> None:
    """A pool of one engine that answers so, in a thread beside it."""

    def pooled(address: str) -> None:
        with RolloutPool(address, GrpoConfig(groups=1, group_size=1), 1, seed=1) as pool:
            use(pool)

    async def scenario() -> None:
        async with (
            a_broker() as (_, address),
            generating(generate) as url,
            Sidecar(Serving(url), broker=address, group=GROUP, name="e0") as sidecar,
        ):
            await sidecar.joined()
            await asyncio.to_thread(pooled, address)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_request_that_is_interrupted_is_none_that_is_lost() -> None:
    """A pause rejects it twice, and its engine dies: it counts as one request."""
    asked = 0

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == 1:
            return web.json_response(PAUSED, status=503)
        if asked == 2:
            return await streamed(request, PAUSED)
        if asked == 3:
            return web.Response(status=500)
        return await streamed(request, *tokens())

    def use(pool: RolloutPool) -> None:
        [[rollout]] = pool.take(1)
        assert rollout.response_ids == tuple(range(task.MAX_TOKENS))
        assert rollout.logprobs == tuple(-float(token) for token in range(task.MAX_TOKENS))
        assert rollout.versions == (3,) * 5 + (4,) * 12
        assert pool.counts.lost == 0
        assert pool.counts.cut_short == {"out_of_service": 1, "killed": 1}
        assert pool.counts.longest_token_gap_ms > 0

    run_pool(generate, use)


def test_a_request_that_its_engine_refuses_ends_the_demo() -> None:
    """No later one would do better."""

    async def generate(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    def use(pool: RolloutPool) -> None:
        with pytest.raises(WavebusError, match="no such model"):
            pool.take(1)

    run_pool(generate, use)
