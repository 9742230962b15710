"""An HTTP server before clients that send half a request, too many, or read nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from bus._runtime import http_server
from bus._runtime.http_access import HttpAccess
from bus._runtime.http_server import ClientRequests, HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TIMEOUT_S = 60.0
HALF = b"POST /double HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
JSON = b"Content-Type: application/json\r\nHost: 127.0.0.1\r\n"


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


class Doubling:
    """A server that doubles a number."""

    def __init__(self, api_key: str = "", **limits: Any) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.server = HttpServer(
            [
                web.post("/double", self._double),
                web.post("/wait", self._wait),
                web.post("/flood", self._flood),
                web.post("/bug", self._bug),
                web.post("/empty", self._empty),
                web.get("/empty", self._empty),
                web.get("/health", self._health),
            ],
            lambda _, status, text: web.json_response({"error": text}, status=status),
            lambda *_: None,
            **{"max_body_bytes": 1 << 24, **limits},
            access=HttpAccess(api_key, is_open="/health".__eq__, is_strict=True),
        )

    async def _double(self, http: web.Request) -> web.Response:
        return web.json_response(2 * (await http.json()))

    async def _empty(self, http: web.Request) -> web.Response:
        return web.json_response(len(await http.read()))

    async def _wait(self, _: web.Request) -> web.Response:
        self.asked.set()
        await self.go_on.wait()
        return web.json_response(1)

    async def _flood(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            await response.prepare(http)
            while True:
                await response.write(b"x" * 65536)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise

    async def _bug(self, _: web.Request) -> web.Response:
        raise KeyError("bug")

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(self.server.load)


@contextlib.asynccontextmanager
async def doubling(
    api_key: str = "", limit: int | None = None, **limits: Any
) -> AsyncIterator[tuple[Doubling, int]]:
    """A server and its port."""
    served = Doubling(api_key, **limits)
    url = await served.server.start("127.0.0.1", 0)
    if limit is not None:
        served.server.limit = limit
    try:
        yield served, int(url.rpartition(":")[2])
    finally:
        served.go_on.set()
        await served.server.close()


async def sent(port: int, raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    await writer.drain()
    return reader, writer


async def answer(port: int, raw: bytes) -> tuple[int, Any]:
    """The status and the JSON, on a connection that is closed afterwards."""
    reader, writer = await sent(port, raw)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))
    finally:
        await close(writer)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def post(path: str, body: bytes, head: bytes = JSON) -> bytes:
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        head,
        len(body),
        body,
    )


def test_half_sent_requests_make_room_for_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers or bodies, the oldest first; a request that is answered keeps its connection."""
    monkeypatch.setattr(http_server, "_SPARED_S", 0.0)

    async def main() -> None:
        async with doubling(limit=3) as (served, port):
            working = asyncio.create_task(answer(port, post("/wait", b"1")))
            await served.asked.wait()
            halves = [await sent(port, each) for each in (HALF, post("/double", b"2")[:-1])]
            assert await answer(port, post("/double", b"21")) == (200, 42)
            assert await halves[0][0].read() == b""
            assert await answer(port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") == (
                200,
                served.server.load,
            )
            halves += [await sent(port, HALF) for _ in range(8)]
            assert await answer(port, post("/double", b"4")) == (200, 8)
            served.go_on.set()
            assert await working == (200, 1)
            assert served.server.load["evicted"] >= 8
            for _, writer in halves:
                await close(writer)

    run(main())


def test_clients_too_many_are_told_so() -> None:
    """While all others are at work, or young."""

    async def main() -> None:
        async with doubling(limit=1) as (served, port):
            working = asyncio.create_task(answer(port, post("/wait", b"1")))
            await served.asked.wait()
            status, told = await answer(port, post("/double", b"1"))
            assert (status, told["error"]["type"]) == (503, "ServiceUnavailableError")
            assert served.server.load["refused"] == 1
            served.go_on.set()
            assert await working == (200, 1)
            while (done := await answer(port, post("/double", b"1")))[0] == 503:
                pass  # the connection before is not closed yet
            assert done == (200, 2)

    run(main())


def test_what_does_not_come_in_time_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADERS_S", "BODY_S", "IDLE_S"):
        monkeypatch.setattr(http_server, name, 0.1)

    async def main() -> None:
        async with doubling() as (served, port):
            for raw in (b"", HALF):
                reader, writer = await sent(port, raw)
                assert await reader.read() == b""
                await close(writer)
            assert (await answer(port, post("/double", b"11")[:-1]))[0] == 408
            reader, writer = await sent(port, post("/double", b"1"))
            assert (await reader.read()).endswith(b"2")  # idle afterwards
            await close(writer)
            served.server.unread_s = 0.1
            _, writer = await sent(port, post("/flood", b"1"))  # is never read
            await served.cancelled.wait()
            await close(writer)
            assert served.server.load["slow"] == 5

    run(main())


def test_a_client_is_not_cut_off_because_the_server_was_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its request was there in time, but the event loop read nothing for longer than the limit."""
    monkeypatch.setattr(http_server, "HEADERS_S", 0.1)

    async def main() -> None:
        async with doubling() as (served, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while not served.server.load["connections"]:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            writer.write(post("/double", b"21"))  # it is sent at once
            time.sleep(0.2)  # noqa: ASYNC251 - the loop is busy
            assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
            await close(writer)
            assert served.server.load["slow"] == 0

    run(main())


def test_a_body_is_bounded_before_it_is_read_as_json() -> None:
    async def main() -> None:
        async with doubling() as (_, port):
            for body in (b"[" + b"[]," * 10**6 + b"1]", b"[" + b"1," * (4 * 10**6) + b"1]"):
                assert (await answer(port, post("/double", body)))[0] == 413
            assert (await answer(port, post("/double", b"[" * 10**5)))[0] == 400
            assert (await answer(port, post("/double", b" " * (17 << 20))))[0] == 413
            assert (await answer(port, post("/bug", b"1"))) == (500, {"error": "KeyError: 'bug'"})
            assert await answer(port, post("/double", b"1")) == (200, 2)

    run(main())


def test_a_body_that_is_too_long_is_refused_before_it_comes() -> None:
    async def main() -> None:
        async with doubling() as (_, port):
            assert (await answer(port, post("/double", b" " * (17 << 20))[:999]))[0] == 413

    run(main())


def test_large_bodies_have_bounded_memory_together_and_small_ones_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_BODIES_AT_ONCE", 1)
    large = b"1" + b" " * (3 << 19)

    async def main() -> None:
        async with doubling(max_body_bytes=1 << 21) as (served, port):
            working = asyncio.create_task(answer(port, post("/wait", large)))
            await served.asked.wait()
            head = JSON + b"Transfer-Encoding: chunked\r\n"
            for raw in (post("/double", large), b"POST /double HTTP/1.1\r\n%b\r\n" % head):
                assert (await answer(port, raw))[0] == 503
            assert await answer(port, post("/double", b"2")) == (200, 4)
            served.go_on.set()
            assert await working == (200, 1)
            assert await answer(port, post("/double", large)) == (200, 2)

    run(main())


def test_a_client_has_a_bounded_number_of_requests_at_once() -> None:
    """Other routes, and other clients, are not concerned; an answered request makes room."""

    async def main() -> None:
        async with doubling(requests=ClientRequests(1, ["/wait", "/bug"])) as (served, port):
            working = asyncio.create_task(answer(port, post("/wait", b"1")))
            await served.asked.wait()
            for path in ("/wait", "/%77ait", "/bug"):
                reader, writer = await sent(port, post(path, b"1"))
                head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                assert head[0].split()[1] == b"429"
                assert b"Retry-After: 1" in head
                await close(writer)
            assert await answer(port, post("/double", b"2")) == (200, 4)
            assert served.server.load["limited"] == 3
            other = ("127.0.0.2", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=other)
            writer.write(post("/bug", b"1"))
            assert (await reader.readuntil(b"\r\n")).split()[1] == b"500"
            await close(writer)
            served.go_on.set()
            assert await working == (200, 1)
            for _ in range(2):
                assert (await answer(port, post("/bug", b"1")))[0] == 500

    run(main())


def test_a_server_chooses_its_own_bounds() -> None:
    async def main() -> None:
        whole = b"[" + b"1," * (4 * 10**6) + b"1]"
        async with doubling(max_body_bytes=1 << 25, max_values=5 * 10**6) as (_, port):
            assert (await answer(port, post("/empty", whole))) == (200, len(whole))
            assert (await answer(port, post("/empty", b" " * (1 << 25) + b"1")))[0] == 413
            more = b"[" + b"1," * (5 * 10**6 + 1) + b"1]"
            assert (await answer(port, post("/empty", more)))[0] == 413

    run(main())


def test_requests_of_libraries_without_a_body_pass() -> None:
    """A POST has no type then; a GET may have a body."""

    async def main() -> None:
        async with doubling() as (_, port):
            host = b"Host: 0.0.0.0:8000\r\n"
            assert await answer(port, post("/empty", b"", host)) == (200, 0)
            raw = b"POST /empty HTTP/1.1\r\nHost: localhost\r\n\r\n"
            assert await answer(port, raw) == (200, 0)
            chunked = host + b"Transfer-Encoding: chunked\r\n"
            raw = b"POST /empty HTTP/1.1\r\n%b\r\n1\r\n1\r\n0\r\n\r\n" % chunked
            assert (await answer(port, raw))[0] == 415
            raw = b"GET /empty HTTP/1.1\r\n%bContent-Length: 2\r\n\r\n{}" % JSON
            assert await answer(port, raw) == (200, 2)

    run(main())


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Type: application/json\r\nHost: 127.0.0.1:80\r\n", 200),
        (b"Content-Type: application/json; charset=utf-8\r\nHost: localhost\r\n", 200),
        (b"Content-Type: application/json\r\nHost: [::1]:80\r\n", 200),
        (b"Host: 127.0.0.1\r\n", 415),
        (b"Content-Type: text/plain\r\nHost: 127.0.0.1\r\n", 415),
        (b"Content-Type: application/x-www-form-urlencoded\r\nHost: 127.0.0.1\r\n", 415),
        (JSON + b"Origin: https://example.com\r\n", 403),
        (JSON + b"Origin: null\r\n", 403),
        (b"Content-Type: application/json\r\nHost: rebound.example.com\r\n", 403),
        (b"Content-Type: application/json\r\nHost: 127.0.0.1.example.com\r\n", 403),
    ],
)
def test_a_web_page_can_not_use_a_server_without_a_key(head: bytes, status: int) -> None:
    async def main() -> None:
        async with doubling() as (_, port):
            assert (await answer(port, post("/double", b"1", head)))[0] == status
        async with doubling("key") as (_, port):  # which no page knows
            assert (await answer(port, post("/double", b"1", head)))[0] == 401
            with_key = head + b"Authorization: Bearer key\r\n"
            assert (await answer(port, post("/double", b"1", with_key)))[0] == 200
            bad = head + b"Authorization: Bearer \xff\r\n"
            assert (await answer(port, post("/double", b"1", bad)))[0] == 401

    run(main())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "none"])
def test_a_compressed_body_is_refused_and_not_unpacked(encoding: str) -> None:
    """A thousand times its size, it would stop all others."""

    async def main() -> None:
        head = JSON + b"Content-Encoding: %b\r\n" % encoding.encode()
        async with doubling() as (_, port):
            assert (await answer(port, post("/double", b"1", head)))[0] == 415
            same = head.replace(encoding.encode(), b"Identity")
            assert (await answer(port, post("/double", b"1", same)))[0] == 200
        async with doubling("key") as (_, port):
            assert (await answer(port, post("/double", b"1", head)))[0] == 401

    run(main())


def test_what_a_client_breaks_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with doubling() as (_, port):
            raw = b"POST /double HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n"
            reader, writer = await sent(port, raw)
            assert (await reader.readline()).split()[1] == b"400"
            await close(writer)

    run(main())
    assert not caplog.records


def test_a_connection_serves_several_requests() -> None:
    async def main() -> None:
        async with doubling() as (served, port), aiohttp.ClientSession() as http:
            for number in range(3):
                url = f"http://127.0.0.1:{port}/double"
                async with http.post(url, json=number) as response:
                    assert await response.json() == 2 * number
            assert served.server.load["connections"] == 1

    run(main())
