"""What the HTTP adapter says of servers that it can't drive, and of those that are gone."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import warnings
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

import bus.log
from bus import operations as ops
from bus.errors import EngineDead, EngineError, UsageError
from bus.messages import NackCode, ProbeResult
from sidecar._vllm import connection_http
from sidecar._vllm import engine as engine_module
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from sidecar._vllm.plugin import operations, worker_rpc
from tests.support.steps import steps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine


@pytest.mark.parametrize("url", ["http://10.0.0.7:8000", "http://example.org", "http://[2001::1]"])
def test_only_loopback(url: str) -> None:
    """Unless asked for: the API key does not cover the RL routes."""
    with pytest.raises(UsageError, match="API key"):
        HttpConnection(url)
    HttpConnection(url, allow_remote=True)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://127.0.0.1"])
def test_urls_that_are_none(url: str) -> None:
    """Refused before anything is tried."""
    with pytest.raises(UsageError):
        HttpConnection(url)


PRESENT = worker_rpc._PRESENT + "wavebus"
FAILURE = operations.WorkerFailure(
    NackCode.CHECKSUM_MISMATCH, "lm_head.weight differs", "lm_head.weight"
)
# What vLLM 0.32 and 0.33 answer on their RL routes when a call has failed.
OLD_DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."
FAMILY = "# TYPE vllm:num_requests_running gauge\n"
NEW_DEATH = "The server had an error while processing your request."


class Server:
    """Answers as an API server would: which of its routes it has is up to the test."""

    def __init__(self, **routes: Any) -> None:
        self.routes: dict[str, Any] = {"health": None, **routes}
        self.ports: list[int] = []  # the callers', of each call
        self.posts: list[tuple[str, Any]] = []  # routes and bodies
        self.names: list[str] = []  # the routes that were called
        self._asked = asyncio.Condition()

    async def asked(self, name: str) -> None:
        """Wait until this route was called."""
        async with self._asked:
            await self._asked.wait_for(lambda: name in self.names)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        if request.method == "POST" and request.can_read_body:
            self.posts.append((name, await request.json()))
        async with self._asked:
            self.names.append(name)
            self._asked.notify_all()
        if name not in self.routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        content = self.routes[name]
        if isinstance(content, web.HTTPException):
            raise content
        if isinstance(content, asyncio.Event):
            await content.wait()
        if isinstance(content, str):
            return web.Response(text=content)
        return web.json_response(content if isinstance(content, dict) else {})


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[tuple[VllmAdapter, web.AppRunner]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine = VllmAdapter(HttpConnection(f"http://127.0.0.1:{port}", ready_timeout_s=2))
    try:
        yield engine, runner
    finally:
        await engine.close()
        await runner.cleanup()


def http(engine: VllmAdapter) -> HttpConnection:
    """The adapter's connection."""
    assert isinstance(engine._vllm, HttpConnection)
    return engine._vllm


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def config(backend: str | None, **parallel: bool) -> dict[str, Any]:
    transfer = None if backend is None else {"backend": backend}
    return {"vllm_config": {"weight_transfer_config": transfer, "parallel_config": parallel}}


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        ({"version": {"version": "0.27.1"}}, "vLLM 0.27.1 is not supported"),
        ({"version": {"version": "0.32.0"}}, "VLLM_SERVER_DEV_MODE=1"),
        (
            {"version": {"version": "0.32.0"}, "server_info": config(None)},
            r"no weight transfer backend: start it with --weight-transfer-config",
        ),
        (
            {
                "version": {"version": "0.32.0"},
                "server_info": config("nccl"),
                "collective_rpc": {"results": ["<WorkerWrapperBase object>"]},
            },
            "backend 'nccl'.* lack wavebus's plugin",
        ),
        (
            {"version": {"version": "0.32.0"}, "server_info": config("sharded_rdt")},
            "'sharded_rdt', which the bus can't drive",
        ),
        (
            {
                "version": {"version": "0.33.0"},
                "server_info": config("wavebus", enable_elastic_ep=True),
                "collective_rpc": {"results": [PRESENT]},
            },
            "has --enable-elastic-ep.*start it without",
        ),
        (
            {
                "version": {"version": "0.33.0"},
                "server_info": config("wavebus", data_parallel_hybrid_lb=True),
                "collective_rpc": {"results": [PRESENT]},
            },
            "has --data-parallel-hybrid-lb.*with one sidecar per rank",
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
        server = Server(collective_rpc={"results": [{"type": "done"}]})
        async with serving(server) as (engine, _):
            await steps(engine).start_update(recover=False, target="draft")
            operation = operations.encode(ops.Start("draft", recover=False))
            [(name, body)] = server.posts
            assert name == "collective_rpc"
            assert body == {"method": operations.PERFORM, "kwargs": {"operation": operation}}

    run(scenario())


def test_requests_are_counted_before_the_first_of_them() -> None:
    """Several API servers show no value then. One that keeps no statistics is refused."""
    value = 'vllm:num_requests_running{engine="0"} 2.0\n'

    async def scenario() -> None:
        for text, count in ((FAMILY, 0), (FAMILY + value, 2)):
            async with serving(Server(metrics=text)) as (engine, _):
                assert await engine.in_flight() == count
        async with serving(Server(metrics="")) as (engine, _):
            with pytest.raises(EngineError, match="--disable-log-stats"):
                await engine.in_flight()

    run(scenario())


def test_requests_are_ended_in_the_core() -> None:
    """Whichever API server they came from; where the core can't, by the one that is asked."""

    async def scenario() -> None:
        state = {"admits": True, "passes": "", "ended": 8}
        server = Server(collective_rpc={"results": [state]}, metrics=FAMILY)
        async with serving(server) as (engine, _):
            await engine._admission.look()
            assert await engine.abort_requests() == 8
            name, body = server.posts[-1]
            assert (name, body["kwargs"]) == ("collective_rpc", {"ends": True})
        ended = {"aborted": 3}
        server = Server(collective_rpc={"results": [None]}, abort_requests=ended, metrics=FAMILY)
        async with serving(server) as (engine, _):
            await engine._admission.look()
            assert await engine.abort_requests() == 3

    run(scenario())


def test_a_probe_is_one_request_with_a_salt_of_its_own() -> None:
    """Greedy, past any end; what a prefix cache holds under another salt has no part in it."""
    content = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -0.25}]
    choice = {"token_ids": [7, 8], "logprobs": {"content": content}}

    async def scenario() -> None:
        server = Server(**{"inference/v1/generate": {"choices": [choice]}})
        async with serving(server) as (engine, _):
            found = await http(engine).generate("probe-1", (1, 2), 2, "salt-of-u1")
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
        routes = {"inference/v1/generate": answer, "metrics": FAMILY}
        async with serving(Server(**routes)) as (engine, _):
            assert await http(engine).accepts_probes() is serves

    run(scenario())


def test_a_start_that_waits_for_its_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """At once, with the URL and what was found. It leaves no session open."""
    bus.log.configure(level="warning", json=True)
    errors: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        engine = VllmAdapter(HttpConnection("http://127.0.0.1:9", ready_timeout_s=0.1))
        with pytest.raises(EngineError, match=r"no healthy server at .*: Connect call failed"):
            await engine.start()
        del engine
        gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the handler gets it too
        run(scenario())
    told = capsys.readouterr()
    assert "engine_not_healthy" in told.err + told.out
    assert errors == []


def test_an_engine_core_that_does_not_answer_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server is healthy, and its core hangs in a collective."""
    monkeypatch.setattr(engine_module, "START_ANSWER_S", 0.05)

    async def scenario() -> None:
        async with serving(Server(version=asyncio.Event())) as (engine, _):
            with pytest.raises(EngineError, match="did not answer for") as found:
                await engine.start()
            assert found.value.code is NackCode.TIMEOUT

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


def test_a_server_that_accepts_no_connection_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, and so is not dead; its queue of connections is full."""
    monkeypatch.setattr(connection_http, "CONNECT_S", 0.1)

    async def scenario() -> None:
        with ExitStack() as stack:
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(4):
                end = stack.enter_context(socket.socket())
                end.setblocking(False)
                end.connect_ex(full.getsockname())
            connection = HttpConnection(f"http://127.0.0.1:{full.getsockname()[1]}")
            with pytest.raises(EngineError, match=r"/resume: no connection in 0.1 s") as found:
                await connection.resume()
            assert not isinstance(found.value, EngineDead)
            await connection.close()

    asyncio.run(scenario())


def test_each_call_has_a_connection_of_its_own() -> None:
    """A server may close one that is kept alive while the next call is on its way."""

    async def scenario() -> None:
        server = Server(resume=None)
        async with serving(server) as (engine, _):
            with pytest.raises(EngineError):
                await engine.start()
            await engine.resume()
            await engine.resume()
            assert len(set(server.ports)) == len(server.ports)

    run(scenario())


@asynccontextmanager
async def breaking(bytes_read: int) -> AsyncIterator[tuple[HttpConnection, list[str]]]:
    """A server that breaks the first connection for a call after so many bytes; and the paths that
    it was asked for."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        asked.append(head.split()[1])
        if asked == ["/collective_rpc"]:
            await reader.readexactly(bytes_read)
            writer.transport.abort()
            return
        length = re.search(r"content-length: (\d+)", head)
        await reader.readexactly(int(length[1]) if length else 0)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n"
            b'Content-Type: application/json\r\n\r\n{"results": [5]}'
        )
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = HttpConnection(f"http://127.0.0.1:{port}")
        try:
            yield connection, asked
        finally:
            await connection.close()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_call_that_did_not_reach_the_server_is_sent_again() -> None:
    """Its connection broke before the server had all of it."""

    async def scenario() -> None:
        async with breaking(1000) as (connection, asked):
            assert await connection.ask("load", {"large": "x" * 2**24}) == [5]
            assert asked == ["/collective_rpc"] * 2

    run(scenario())


def test_a_server_that_breaks_a_connection_and_answers_others_is_alive() -> None:
    """The call may have been made, so it is not sent again."""

    async def scenario() -> None:
        async with breaking(2) as (connection, asked):
            with pytest.raises(EngineError, match="the server lives") as found:
                await connection.ask("load")
            assert not isinstance(found.value, EngineDead)
            assert asked == ["/collective_rpc", "/health"]

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


@pytest.mark.parametrize("text", [OLD_DEATH, NEW_DEATH, "Failed to pause generation: whatever"])
def test_a_dead_engine_is_recognised_by_its_servers_health(text: str) -> None:
    """Whatever the answer says; the same answer of a healthy server is an error of the call."""

    async def scenario() -> None:
        server = Server(pause=web.HTTPInternalServerError(text=text))
        async with serving(server) as (engine, _):
            with pytest.raises(EngineError) as failed:
                await engine.pause("keep", clear_cache=True)
            assert failed.value.code is NackCode.ENGINE_FAILED
            assert text in failed.value.detail
            server.routes["pause"] = web.HTTPInternalServerError(text=text)
            server.routes["health"] = web.HTTPServiceUnavailable()
            with pytest.raises(EngineDead):
                await engine.pause("keep", clear_cache=True)

    run(scenario())


def test_a_server_that_ends_with_its_engine_is_dead() -> None:
    """It has answered, and nobody listens any more."""

    async def scenario() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            server.close()
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        engine = VllmAdapter(
            HttpConnection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        )
        with pytest.raises(EngineDead, match="/pause: the server's engine is dead"):
            await engine.pause("keep", clear_cache=True)
        await engine.close()

    run(scenario())


def test_what_the_plugin_says_gets_through_an_error() -> None:
    """With its code and its tensor; nobody asks for the server's health."""
    said = {"error": {"message": f"Call failed: {FAILURE.to_text()}"}}
    answer = web.HTTPInternalServerError(text=json.dumps(said))

    async def scenario() -> None:
        server = Server(collective_rpc=answer)
        async with serving(server) as (engine, _):
            with pytest.raises(EngineError) as failed:
                await steps(engine).start_update(recover=False)
            assert (failed.value.code, failed.value.tensor) == (FAILURE.code, FAILURE.tensor)
            assert len(server.ports) == 1

    run(scenario())


def test_an_engine_wakes_by_its_workers_and_resumes_by_vllms_own_wake() -> None:
    """That one tells a KV connector where the cache lies now."""

    async def scenario() -> None:
        server = Server(collective_rpc={"results": [None]}, wake_up={"status": "awake"})
        async with serving(server) as (engine, _):
            await engine.wake()
            assert server.names == ["collective_rpc", "wake_up"]

    run(scenario())
