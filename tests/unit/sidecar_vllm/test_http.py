"""What the HTTP adapter says of servers that it can't drive, and of those that are gone."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from bus.errors import EngineDead, EngineError, UsageError
from sidecar import vllm_connections
from sidecar.engine import ProbeResult
from sidecar.vllm_http import VllmHttpEngine
from sidecar.vllm_plugin import facts, wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine


@pytest.mark.parametrize("url", ["http://10.0.0.7:8000", "http://example.org", "http://[2001::1]"])
def test_only_loopback(url: str) -> None:
    """Unless asked for: the API key does not cover the RL routes."""
    with pytest.raises(UsageError, match="API key"):
        VllmHttpEngine(url)
    VllmHttpEngine(url, allow_remote=True)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://127.0.0.1"])
def test_urls_that_are_none(url: str) -> None:
    """Refused before anything is tried."""
    with pytest.raises(UsageError):
        VllmHttpEngine(url)


class Server:
    """Answers as an API server would: which of its routes it has is up to the test."""

    def __init__(self, **routes: Any) -> None:
        self.routes: dict[str, Any] = {"health": None, **routes}
        self.ports: list[int] = []  # the callers', of each call
        self.posts: list[tuple[str, Any]] = []  # routes and bodies
        self._asked = asyncio.Condition()
        self._names: list[str] = []

    async def asked(self, name: str) -> None:
        """Wait until this route was called."""
        async with self._asked:
            await self._asked.wait_for(lambda: name in self._names)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        if request.method == "POST" and request.can_read_body:
            self.posts.append((name, await request.json()))
        async with self._asked:
            self._names.append(name)
            self._asked.notify_all()
        if name not in self.routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        content = self.routes[name]
        if isinstance(content, web.HTTPException):
            raise content
        if isinstance(content, asyncio.Event):
            await content.wait()
        return web.json_response(content if isinstance(content, dict) else {})


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[tuple[VllmHttpEngine, web.AppRunner]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine = VllmHttpEngine(f"http://127.0.0.1:{port}", ready_timeout_s=2)
    try:
        yield engine, runner
    finally:
        await engine.close()
        await runner.cleanup()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def config(backend: str | None) -> dict[str, Any]:
    transfer = None if backend is None else {"backend": backend}
    return {"vllm_config": {"weight_transfer_config": transfer}}


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        ({"version": {"version": "0.27.1"}}, "vLLM 0.27.1 is not supported"),
        ({"version": {"version": "0.32.0"}}, "VLLM_SERVER_DEV_MODE=1"),
        (
            {"version": {"version": "0.32.0"}, "server_info": config(None)},
            r"no backend: start it with --weight-transfer-config",
        ),
        (
            {
                "version": {"version": "0.32.0"},
                "server_info": config("nccl"),
                "collective_rpc": {"results": ["<WorkerWrapperBase object>"]},
            },
            "backend 'nccl'.* no plugin",
        ),
        (
            {"version": {"version": "0.32.0"}, "server_info": config("sharded_rdt")},
            "'sharded_rdt', which the bus can't drive",
        ),
        ({"health": web.HTTPServiceUnavailable()}, "no healthy server"),
    ],
)
def test_servers_that_cannot_be_driven(routes: dict[str, Any], text: str) -> None:
    """The text says how to start one that can."""

    async def scenario() -> None:
        async with serving(Server(**routes)) as (engine, _):
            with pytest.raises(EngineError, match=text):
                await engine.start()

    run(scenario())


def test_a_step_is_one_post() -> None:
    """Of one operation, for all workers."""

    async def scenario() -> None:
        server = Server(collective_rpc={"results": ["1"]})
        async with serving(server) as (engine, _):
            engine._connections = vllm_connections.Connections(5.0)
            await engine.start_update(recover=False, target="draft")
            operation = wire.encode(wire.Start("draft", recover=False))
            [(name, body)] = server.posts
            assert name == "collective_rpc"
            assert body == {"method": facts.PERFORM, "kwargs": {"operation": operation}}

    run(scenario())


def test_a_probe_is_one_request_with_a_salt_of_its_own() -> None:
    """Greedy, past any end; what a prefix cache holds under another salt has no part in it."""
    content = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -0.25}]
    choice = {"token_ids": [7, 8], "logprobs": {"content": content}}

    async def scenario() -> None:
        server = Server(**{"inference/v1/generate": {"choices": [choice]}})
        async with serving(server) as (engine, _):
            engine._connections = vllm_connections.Connections(5.0)
            found = await engine.probe_one("probe-1", (1, 2), 2, "salt-of-u1")
            assert found == ProbeResult((7, 8), (-0.5, -0.25))
            [(name, body)] = server.posts
            assert name == "inference/v1/generate"
            assert body["cache_salt"] == "salt-of-u1"
            assert (body["token_ids"], body["request_id"]) == ([1, 2], "probe-1")
            sampling = body["sampling_params"]
            assert (sampling["temperature"], sampling["max_tokens"]) == (0.0, 2)
            assert sampling["ignore_eos"]

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "serves"),
    [
        (web.HTTPUnprocessableEntity(), True),
        (web.HTTPBadRequest(), True),
        (web.HTTPUnauthorized(), False),
        (web.HTTPNotFound(), False),
    ],
)
def test_who_is_asked_for_an_api_key_runs_no_probes(
    answer: web.HTTPException, serves: bool
) -> None:
    """Nor who has no such route. It is asked before anything begins."""

    async def scenario() -> None:
        async with serving(Server(**{"inference/v1/generate": answer})) as (engine, _):
            engine._connections = vllm_connections.Connections(5.0)
            assert await engine._serves_us() is serves

    run(scenario())


def test_a_call_has_no_read_timeout_and_ends_with_the_server() -> None:
    """A pause that takes long is no failure; one whose server goes away is."""
    forever = asyncio.Event()

    async def scenario() -> None:
        async with serving(Server(pause=forever)) as (engine, runner):
            with pytest.raises(EngineError):
                await engine.start()
            pause = asyncio.create_task(engine.pause("keep", clear_cache=True))
            done, _ = await asyncio.wait([pause], timeout=0.2)
            assert not done
            await runner.cleanup()
            with pytest.raises(EngineDead):
                await pause

    run(scenario())


def test_a_quiet_connection_is_closed_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes it may do so while a pause is on its way."""
    monkeypatch.setattr(vllm_connections, "KEEP_ALIVE_S", 0.05)

    async def scenario() -> None:
        hung_up = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.readline():
                while (await reader.readline()).strip():
                    pass
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
            hung_up.set()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            engine = VllmHttpEngine(f"http://127.0.0.1:{port}", ready_timeout_s=2)
            with pytest.raises(EngineError):
                await engine.start()
            await hung_up.wait()
            await engine.close()

    run(scenario())


def test_a_connection_that_saw_a_failure_is_not_used_again() -> None:
    """Servers close it a moment later, perhaps when the next call has just taken it. What is
    under way beside the failure goes on."""
    waiting = asyncio.Event()

    async def scenario() -> None:
        server = Server(resume=None, pause=waiting, abort_requests=web.HTTPInternalServerError())
        async with serving(server) as (engine, _):
            with pytest.raises(EngineError):
                await engine.start()
            await engine.resume()
            await engine.resume()
            kept, again = server.ports[-2:]
            assert kept == again
            pause = asyncio.create_task(engine.pause("keep", clear_cache=True))
            await server.asked("pause")
            with pytest.raises(EngineError):
                await engine.post("/abort_requests")
            failed = server.ports[-1]
            await engine.resume()
            assert server.ports[-1] not in (failed, kept)
            waiting.set()
            await pause

    run(scenario())


def test_death_is_told_from_being_busy() -> None:
    """Slow is busy. Not listening is dead, and so is who says so."""

    async def scenario() -> None:
        server = Server()
        async with serving(server) as (engine, runner):
            with pytest.raises(EngineError):
                await engine.start()
            death = asyncio.create_task(engine.died())
            server.routes["health"] = asyncio.Event()
            done, _ = await asyncio.wait([death], timeout=2.5)
            assert not done
            await runner.cleanup()
            assert "nothing listens" in await death

    run(scenario())


def test_a_server_may_say_that_its_engine_is_dead() -> None:
    """vLLM's /health answers 503 then."""

    async def scenario() -> None:
        server = Server()
        async with serving(server) as (engine, _):
            with pytest.raises(EngineError):
                await engine.start()
            server.routes["health"] = web.HTTPServiceUnavailable()
            assert "503" in await engine.died()

    run(scenario())
