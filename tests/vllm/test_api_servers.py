"""One engine behind several API servers, which boots closed and is attached to."""

from __future__ import annotations

import asyncio
import os
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bus.rejection import is_closed
from sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from sidecar._vllm.plugin.environment import BOOT_CLOSED
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint
from tests.vllm._vllm import (
    MAX_POSITIONS,
    PROMPT,
    REST_MS,
    boot_environment,
    require_vllm,
    server_argv,
)
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [
    pytest.mark.ci,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

API_SERVERS = 3
BEGUN, LATE = 8, 4
LONG = 2000


def test_an_engine_of_several_api_servers(tmp_path: Path) -> None:
    """It refuses requests until its sidecar has joined a group. A quarantine ends all requests,
    whichever API server they came to: with the tokens that they have, or else with the reason."""
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)
    options = server_argv(checkpoint.folder, "--api-server-count", str(API_SERVERS))[3:]
    environment = {**os.environ, **boot_environment(tmp_path, rest_ms=REST_MS), BOOT_CLOSED: "1"}
    argv = [sys.executable, "-m", "tests.vllm._serve", *options]

    async def scenario() -> None:
        async with SupervisedServer(argv, env=environment) as server:
            await _play(server.base_url, checkpoint.greedy(checkpoint.weights, PROMPT, 8))

    asyncio.run(asyncio.wait_for(scenario(), 600))


async def _play(url: str, expected: list[int]) -> None:
    async def ask(tokens: int) -> tuple[int, Any]:
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling}
        # A connection of its own: the kernel picks the API server.
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/inference/v1/generate", json=body) as response,
        ):
            return response.status, await response.json()

    for status, answer in await asyncio.gather(*(ask(8) for _ in range(2 * API_SERVERS))):
        assert (status, is_closed(answer)) == (HTTPStatus.SERVICE_UNAVAILABLE, True)
        assert "not joined its group" in answer["error"]["message"]
    engine = VllmAdapter(HttpConnection(url))  # it attaches before the first request is served
    async with (
        a_broker() as (_, address),
        Sidecar(engine, broker=address, name="e0") as sidecar,
        TrainerAgent(address) as agent,
    ):
        assert sidecar.info is not None
        assert sidecar.info.booted_closed
        await agent.wait_for_engines(1)
        status, answer = await ask(8)
        assert status == HTTPStatus.OK, answer
        assert answer["choices"][0]["token_ids"] == expected

    # As a sidecar does to an engine that is quarantined.
    attached = VllmAdapter(HttpConnection(url))
    await attached.start()
    begun = [asyncio.create_task(ask(LONG)) for _ in range(BEGUN)]
    while await attached.in_flight() < BEGUN or not _is_stepping(attached):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await attached.pause("keep", clear_cache=False)
    late = [asyncio.create_task(ask(8)) for _ in range(LATE)]
    while await attached.in_flight() < BEGUN + LATE:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.02)
    await attached.admit(open=False)
    assert await attached.abort_requests() == BEGUN + LATE
    for status, answer in await asyncio.gather(*begun):
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"]) == (HTTPStatus.OK, "abort")
        assert 0 < len(choice["token_ids"]) < LONG
    for status, answer in await asyncio.gather(*late):
        assert (status, is_closed(answer)) == (HTTPStatus.SERVICE_UNAVAILABLE, True)
    await attached.admit(open=True)
    await attached.resume()
    assert (await ask(8))[1]["choices"][0]["token_ids"] == expected
    await attached.close()


def _is_stepping(engine: VllmAdapter) -> bool:
    """Every request runs, and has had a step since."""
    view = engine.core_view()
    return view is not None and view.running == BEGUN and view.step > BEGUN
