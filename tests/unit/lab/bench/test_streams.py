"""Streams of an engine that is paused when they begin."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from lab.bench import streams
from lab.bench.harness import BenchFailed
from tests.support.generating import PAUSED, generating


def test_what_a_pause_rejects_is_sent_again() -> None:
    """As an event of a stream, whose status line is gone by then; another error is none of that."""
    events: list[Any] = [PAUSED, PAUSED, {"choices": [{"index": 0, "token_ids": [5, 6]}]}]

    async def generate(_: web.Request) -> web.Response:
        return web.Response(text=f"data: {json.dumps(events.pop(0))}\n\ndata: [DONE]\n\n")

    async def scenario() -> None:
        async with generating(generate) as url:
            async with streams.streaming([url], 1, 2) as running:
                await running.have(2)
            assert (running.counts, events) == ([2], [])
            events.append({"error": {"type": "InternalServerError", "code": 500}})
            with pytest.raises(BenchFailed, match="InternalServerError"):
                async with streams.streaming([url], 1, 2):
                    pass

    asyncio.run(asyncio.wait_for(scenario(), 30))
