"""What the data routes of every engine must do, by whichever code they are served.

A subclass of :class:`DataRoutesContract` brings one engine that serves, as :class:`Routes`. The
suite leaves it open and running.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bus.rejection import is_closed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bus.messages import RequestLimits
    from sidecar.engine import Engine

GENERATE = "/inference/v1/generate"
API_KEY = "key of the tests"
PROMPT = (5, 9, 77, 31, 12)
TOKENS = 8
SAMPLING = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
KEYED = {"Authorization": f"Bearer {API_KEY}"}


@dataclass(frozen=True)
class Routes:
    """An engine that serves its data routes on all addresses, and asks for :data:`API_KEY`.

    Attributes:
        engine: the adapter, started.
        url: where this host reaches them.
        limits: what it says of the requests that it takes.
        version: what it serves as.
        bodies: of each route that generates, a request of :data:`TOKENS` tokens.
        control: a route of whoever commands the engine, by its method; empty: it has none.
        run: runs a coroutine in the event loop that the engine lives in.
    """

    engine: Engine
    url: str
    limits: RequestLimits
    version: int
    bodies: dict[str, dict[str, Any]]
    control: str
    run: Callable[[Coroutine[Any, Any, None]], None]


def bodies(model: str | None = None) -> dict[str, dict[str, Any]]:
    """Those of vLLM with a model of this name; without one, of an engine that generates alone."""
    generate = {GENERATE: {"token_ids": PROMPT, "sampling_params": SAMPLING}}
    if model is None:
        return generate
    completion = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS}
    return generate | {"/v1/completions": completion}


def routes_contract(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(self: DataRoutesContract, routes: Routes) -> None:
        async def with_client() -> None:
            async with aiohttp.ClientSession(routes.url, headers=KEYED) as http:
                await test(self, routes, http)

        routes.run(asyncio.wait_for(with_client(), 180.0))

    del run.__wrapped__  # pytest knows of no `http`
    return run


def address_of_this_host() -> str:
    """One beside loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address beside loopback")
        return str(probe.getsockname()[0])


async def events(http: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What an answer that streams says, until its end."""
    found = []
    async with http.post(GENERATE, json=body | {"stream": True}, raise_for_status=True) as response:
        async for line in response.content:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                found.append(json.loads(text))
    return found


class DataRoutesContract:
    """The suite. A subclass, or its module, has a fixture ``routes``."""

    @routes_contract
    async def test_each_event_names_the_versions_of_all_tokens_so_far(
        self, routes: Routes, http: aiohttp.ClientSession
    ) -> None:
        """A server that was held up sends all tokens in one event: then it is asked again."""
        choices: list[dict[str, Any]] = []
        while len(choices) < 2:
            choices = [c for e in await events(http, routes.bodies[GENERATE]) for c in e["choices"]]
        tokens = 0
        for choice in choices:
            tokens += len(choice["token_ids"])
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            [span] = choice["weight_versions"]
            assert (span["start"], span["end"]) == (0, tokens)
            assert span["version"] in (str(routes.version), "default")
        assert tokens == TOKENS
        assert choices[-1]["finish_reason"] == "length"

    @routes_contract
    async def test_tokens_beyond_the_vocabulary_are_refused_and_harm_nobody(
        self, routes: Routes, http: aiohttp.ClientSession
    ) -> None:
        assert routes.limits.vocab_size
        body = routes.bodies[GENERATE] | {"token_ids": [routes.limits.vocab_size]}
        async with http.post(GENERATE, json=body) as response:
            assert response.status == 400, await response.text()
        async with http.post(GENERATE, json=body | {"stream": True}) as response:
            text = await response.text()  # of vLLM, an event
            told = json.loads(text.split("\n")[0].removeprefix("data: "))
            assert told["error"]["code"] == 400, text
        body = routes.bodies[GENERATE] | {"token_ids": [routes.limits.vocab_size - 1]}
        assert await events(http, body)

    @routes_contract
    async def test_a_closed_engine_says_so_on_every_route(
        self, routes: Routes, http: aiohttp.ClientSession
    ) -> None:
        await routes.engine.admit(open=False)
        try:
            for path, body in routes.bodies.items():
                async with http.post(path, json=body) as response:
                    told = await response.json()
                assert (response.status, is_closed(told)) == (503, True), path
            assert any(map(is_closed, await events(http, routes.bodies[GENERATE])))
        finally:
            await routes.engine.admit(open=True)
        for path, body in routes.bodies.items():
            async with http.post(path, json=body) as response:
                assert response.status == 200, path

    @routes_contract
    async def test_without_the_key_nobody_generates(
        self, routes: Routes, http: aiohttp.ClientSession
    ) -> None:
        for path, body in routes.bodies.items():
            for wrong in ("", "Bearer", f"Bearer {API_KEY}x", API_KEY):
                headers = {"Authorization": wrong}
                async with http.post(path, json=body, headers=headers) as response:
                    assert response.status == 401, path
        async with http.get("/health", headers={"Authorization": ""}) as response:
            assert response.status == 200

    @routes_contract
    async def test_clients_of_other_hosts_generate_and_command_nothing(
        self, routes: Routes, http: aiohttp.ClientSession
    ) -> None:
        """They have the key; and say that they are of this host."""
        elsewhere = aiohttp.TCPConnector(local_addr=(address_of_this_host(), 0))
        async with aiohttp.ClientSession(routes.url, headers=KEYED, connector=elsewhere) as other:
            assert await events(other, routes.bodies[GENERATE])
            for headers in ({}, {"X-Forwarded-For": "127.0.0.1"}):
                async with other.post(routes.control or "/pause", headers=headers) as response:
                    assert response.status == (403 if routes.control else 404)
        assert await events(http, routes.bodies[GENERATE])
