"""`wavebus routes --router`: the worker list of a vllm-router follows a group."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import test_utils, web
from safetensors.torch import load_file

from sidecar._supervision.launch import free_port
from tests.support.procs import Proc, run_wavebus, wavebus
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.conftest import Bus

TIMEOUT_S = 60.0
FOREIGN = "http://127.0.0.1:9"


class RouterStandIn:
    """The worker list of a vllm-router, by its routes. ``ill``: adding it ends at ``healed``;
    ``kept``: so does removing it."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.events: list[str] = []
        self.polls = 0
        self.ill = self.kept = ""
        self.healed = asyncio.Event()
        self._changed = asyncio.Event()
        self._server: test_utils.TestServer | None = None

    async def start(self, port: int | None = None) -> str:
        app = web.Application()
        app.router.add_get("/list_workers", self._list)
        app.router.add_post("/add_worker", self._add)
        app.router.add_post("/remove_worker", self._remove)
        self._server = test_utils.TestServer(app, port=port)
        await self._server.start_server()
        return str(self._server.make_url("")).rstrip("/")

    async def stop(self) -> int:
        """Returns the port, for the next start."""
        assert self._server is not None
        self.healed.set()
        port = self._server.port
        assert port is not None
        await self._server.close()
        return port

    async def until(self, *urls: str) -> None:
        """Return when these are the workers."""
        while sorted(self.urls) != sorted(urls):
            self._changed.clear()
            await self._changed.wait()

    async def asked(self, event: str) -> None:
        """Return when this was asked for, whether or not it is done."""
        while event not in self.events:
            self._changed.clear()
            await self._changed.wait()

    async def polled(self) -> None:
        """Return when the list was read, and what followed from it was done."""
        since = self.polls
        while self.polls < since + 2:
            self._changed.clear()
            await self._changed.wait()

    async def _list(self, _: web.Request) -> web.Response:
        self.polls += 1
        self._changed.set()
        return web.json_response({"urls": self.urls})

    async def _add(self, request: web.Request) -> web.Response:
        url = request.query["url"]
        self.events.append(f"+{url}")
        self._changed.set()
        if url == self.ill:
            await self.healed.wait()
        self.urls.append(url)
        self._changed.set()
        return web.Response()

    async def _remove(self, request: web.Request) -> web.Response:
        url = request.query["url"]
        self.events.append(f"-{url}")
        self._changed.set()
        if url == self.kept:
            await self.healed.wait()
        self.urls.remove(url)
        self._changed.set()
        return web.Response()


@contextlib.asynccontextmanager
async def a_router() -> AsyncIterator[tuple[RouterStandIn, str]]:
    router = RouterStandIn()
    url = await router.start()
    try:
        yield router, url
    finally:
        await router.stop()


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


def endpoints(bus: Bus, engines: int = 2) -> dict[str, str]:
    """Where so many engines take requests, once they are routed."""
    with wavebus("routes", "--broker", bus.address, "--follow", "--json") as watch:
        while len(found := json.loads(watch.first_line())["engines"]) < engines:
            pass
    return {each["engine"]: each["endpoint"] for each in found}


def follow(bus: Bus, router: str) -> Proc:
    return bus.add(wavebus("routes", "--broker", bus.address, "--router", router))


@pytest.mark.ci
def test_the_list_follows_the_group_and_a_router_that_comes_back(bus: Bus) -> None:
    first, second = bus.sidecar("e0"), bus.sidecar("e1")
    at = endpoints(bus)

    async def main() -> None:
        async with a_router() as (router, url):
            router.urls = [FOREIGN, at["e1"]]
            watch = follow(bus, url)
            await router.until(FOREIGN, at["e0"], at["e1"])
            assert router.events == [f"+{at['e0']}"]
            await asyncio.to_thread(second.kill)
            await router.until(FOREIGN, at["e0"])
            port = await router.stop()
            await asyncio.to_thread(watch.wait_event, "router_unreachable")
            router.urls = [at["e1"]]
            await router.start(port)
            await router.until(at["e0"])
            assert watch.process.poll() is None
            assert await asyncio.to_thread(watch.stop) == 0
            assert router.urls == [at["e0"]]

    run(main())
    first.kill()


@pytest.mark.ci
def test_an_engine_behind_its_group_is_no_worker_until_it_has_caught_up(bus: Bus) -> None:
    """It was on the router's list, and no route ever named it to the command."""
    first = bus.sidecar("e0", "--port", str(free_port()))
    bus.sidecar("e1")
    at = endpoints(bus)
    weights = load_file(f"{bus.checkpoint.folder}/model.safetensors")

    async def main() -> None:
        async with a_router() as (router, url), TrainerAgent(bus.address) as agent:
            router.urls = list(at.values())
            await agent.update_weights(weights)
            await asyncio.to_thread(first.kill)
            port = at["e0"].rpartition(":")[2]
            await asyncio.to_thread(bus.sidecar, "e0", "--port", port)
            follow(bus, url)
            await router.until(at["e1"])
            await agent.update_weights(weights)
            await router.until(*at.values())

    run(main())


@pytest.mark.ci
def test_an_engine_that_the_router_does_not_find_well_holds_up_no_other(bus: Bus) -> None:
    bus.sidecar("e0")
    ill = endpoints(bus, 1)["e0"]

    async def main() -> None:
        async with a_router() as (router, url):
            router.ill = ill
            follow(bus, url)
            await router.asked(f"+{ill}")
            await asyncio.to_thread(bus.sidecar, "e1")
            at = await asyncio.to_thread(endpoints, bus)
            await router.until(at["e1"])
            assert router.events.count(f"+{ill}") == 1
            router.healed.set()
            await router.until(*at.values())

    run(main())


@pytest.mark.ci
def test_a_broker_that_is_started_anew_removes_no_engine_that_it_does_not_know_yet(
    bus: Bus,
) -> None:
    bus.sidecar("e0")
    late = bus.sidecar("e1")
    at = endpoints(bus)

    async def main() -> None:
        async with a_router() as (router, url):
            watch = follow(bus, url)
            await router.until(*at.values())
            late.signal(signal.SIGSTOP)
            bus.broker.kill()
            broker = await asyncio.to_thread(bus.start_broker, bus.address)
            for _ in range(2):
                await asyncio.to_thread(broker.wait_event, "peer_joined")
            await router.polled()
            late.signal(signal.SIGCONT)
            assert await asyncio.to_thread(watch.stop) == 0
            assert sorted(router.events) == sorted(f"+{each}" for each in at.values())

    run(main())


def be_patient(bus: Bus) -> None:
    """Another broker, whose heartbeats are so far apart that nobody is late for one."""
    bus.broker.kill()
    more = ("--heartbeat-ms", "30000", "--peer-timeout-ms", "90000")
    bus.broker = bus.start_broker(bus.address, *more)


async def ask(http: aiohttp.ClientSession, url: str, session: str = "s") -> dict[str, Any]:
    """The one choice of a short answer.

    Raises:
        AssertionError: it is not whole.
    """
    body = {"token_ids": [5, 9], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    headers = {"X-Session-ID": session}
    async with http.post(f"{url}/inference/v1/generate", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
        assert len(choice["token_ids"]) == 4, choice
        return dict(choice)


@pytest.mark.ci
def test_an_engine_that_stops_serves_until_the_router_has_let_it_go(bus: Bus) -> None:
    be_patient(bus)
    first = bus.sidecar("e0")
    bus.sidecar("e1")
    at = endpoints(bus)

    async def main() -> None:
        async with a_router() as (router, url), aiohttp.ClientSession() as http:
            router.kept = at["e0"]
            follow(bus, url)
            await router.until(*at.values())
            await router.polled()
            first.signal(signal.SIGTERM)
            await router.asked(f"-{at['e0']}")
            for _ in range(20):
                await ask(http, at["e0"])
            router.healed.set()
            assert await asyncio.to_thread(first.wait) == 0
            assert router.urls == [at["e1"]]

    run(main())


@pytest.mark.ci
def test_a_router_that_hangs_delays_a_stop_by_no_more_than_a_heartbeat(bus: Bus) -> None:
    first = bus.sidecar("e0")
    at = endpoints(bus, 1)

    async def main() -> None:
        async with a_router() as (router, url):
            router.kept = at["e0"]
            follow(bus, url)
            await router.until(at["e0"])
            await router.polled()
            first.signal(signal.SIGTERM)
            await asyncio.to_thread(bus.broker.wait_event, "routes_not_taken")
            assert await asyncio.to_thread(first.wait) == 0
            assert router.urls == [at["e0"]]

    run(main())


def test_a_url_is_needed() -> None:
    shown = run_wavebus("routes", "--router", "127.0.0.1:30000")
    assert (shown.returncode, "--router" in shown.stderr) == (2, True)


# The real one

START = """
import os, sys
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it logs each request, and nobody reads that
from vllm_router.router import Router
from vllm_router.router_args import RouterArgs
port = int(sys.argv[1])
Router.from_args(RouterArgs(
    host="127.0.0.1", port=port, policy="consistent_hash", prometheus_port=int(sys.argv[2]),
)).start()
"""


needs_vllm_router = pytest.mark.skipif(
    find_spec("vllm_router") is None and "WAVEBUS_REQUIRE_VLLM" not in os.environ,
    reason="needs vllm-router, which comes with vLLM here",
)


async def listed(http: aiohttp.ClientSession, router: str, *urls: str) -> None:
    """Return when these are the workers."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(f"{router}/list_workers") as response:
                if sorted((await response.json())["urls"]) == sorted(urls):
                    return


@needs_vllm_router
def test_vllm_router_loses_no_request_to_an_engine_that_stops(bus: Bus) -> None:
    """It sends requests to that engine for as long as it is in the list, and not afterwards."""
    be_patient(bus)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    first = bus.sidecar("e0")
    bus.sidecar("e1")
    at = endpoints(bus)
    bus.add(Proc(sys.executable, "-c", START, str(port), str(free_port())))

    async def main() -> None:
        async with aiohttp.ClientSession() as http:
            await listed(http, url)
            watch = follow(bus, url)
            await listed(http, url, *at.values())
            for _ in at:
                await asyncio.to_thread(watch.wait_event, "router_worker_added")
            watch.signal(signal.SIGSTOP)
            first.signal(signal.SIGTERM)
            await asyncio.to_thread(bus.broker.wait_event, "routes", gone=["e0"])
            for number in range(32):
                await ask(http, url, f"s{number}")
            assert first.process.poll() is None
            watch.signal(signal.SIGCONT)
            assert await asyncio.to_thread(first.wait) == 0
            await listed(http, url, at["e1"])
            for number in range(32):
                await ask(http, url, f"s{number}")

    run(main())


@needs_vllm_router
@pytest.mark.ci
def test_vllm_router_asks_no_engine_that_is_behind_its_group(bus: Bus) -> None:
    """All answers are whole, and of the group's version, while one comes back and catches up."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    first = bus.sidecar("e0", "--port", str(free_port()))
    bus.sidecar("e1")
    at = endpoints(bus)
    weights = load_file(f"{bus.checkpoint.folder}/model.safetensors")
    bus.add(Proc(sys.executable, "-c", START, str(port), str(free_port())))

    async def main() -> None:
        versions: list[str] = []
        async with aiohttp.ClientSession() as http, TrainerAgent(bus.address) as agent:

            async def go_on_asking(number: int, enough: asyncio.Event) -> None:
                while not enough.is_set():
                    choice = await ask(http, url, f"s{number}")
                    versions.append(choice["weight_versions"][-1]["version"])

            await listed(http, url)
            follow(bus, url)
            await listed(http, url, *at.values())
            await agent.update_weights(weights)
            await asyncio.to_thread(first.stop)
            await listed(http, url, at["e1"])
            enough = asyncio.Event()
            asking = [asyncio.create_task(go_on_asking(number, enough)) for number in range(8)]
            await asyncio.to_thread(bus.sidecar, "e0", "--port", at["e0"].rpartition(":")[2])
            await agent.update_weights(weights)
            await listed(http, url, *at.values())
            enough.set()
            await asyncio.gather(*asking)
        assert set(versions) == {"1", "2"}

    run(main())
