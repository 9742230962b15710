"""A supervised API server under the bus: the engine contract over HTTP, and the data plane.

It is served to other hosts, so an API key is asked for in all tests; and uvicorn is told to believe
whoever says for whom it forwards requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import anyio
import pytest

from bus._keys import API_KEY_VARIABLE
from bus.errors import EngineDead, EngineError
from bus.messages import NO_LIMITS, NackCode, RequestLimits
from bus.rejection import is_closed, is_rejected
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.core_state import parse_version
from sidecar._vllm.engine import VllmAdapter
from tests.contract.bus_suite import BusContract
from tests.contract.data_routes_suite import API_KEY, KEYED, DataRoutesContract, Routes, bodies
from tests.contract.engine_suite import EngineContract, Generated, Watch
from tests.contract.staged_suite import StagedContract
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.processes import children, descendants, runs
from tests.vllm._vllm import (
    AGAIN_S,
    MAX_POSITIONS,
    REST_MS,
    Oracle,
    boot_environment,
    paused_update,
    rejects_in_pauses,
    require_vllm,
    server_argv,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from bus.messages import PauseMode
    from sidecar.engine import Engine

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


VOCABULARY = 128


class Served:
    """An API server under test, asked through its token-in, token-out route."""

    workers = 1
    long_tokens = 600
    late_tokens = 8
    quiet_s = 0.3
    wait_s = 300.0
    canary: Literal["abort", "keep"] = "abort"

    def __init__(
        self, server: SupervisedServer, checkpoint: Checkpoint, runner: asyncio.Runner
    ) -> None:
        self.server = server
        self.engine: Engine = VllmAdapter(HttpConnection(server=server))
        self.checkpoint = checkpoint
        self.oracle = Oracle(checkpoint.folder)
        self.weights: Mapping[str, Tensor] = checkpoint.weights
        self.version = 0
        self.limits = NO_LIMITS
        self._runner = runner

    @property
    def rejects(self) -> bool:
        return rejects_in_pauses()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, *, watch: Watch | None = None
    ) -> Generated:
        while (served := await self._generate(prompt, max_tokens, watch)) is None:
            if watch is not None:
                await watch.reject()
            await asyncio.sleep(AGAIN_S)
        return served

    async def _generate(
        self, prompt: Sequence[int], max_tokens: int, watch: Watch | None
    ) -> Generated | None:
        """None: a pause has rejected it. One that a closed engine refuses has no tokens, as in
        process."""
        body = {
            "token_ids": list(prompt),
            "sampling_params": {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True},
            "stream": True,
        }
        tokens: list[int] = []
        choice: dict[str, Any] = {}
        url = f"{self.server.base_url}/inference/v1/generate"
        async with (
            aiohttp.ClientSession(headers=KEYED) as session,
            session.post(url, json=body, raise_for_status=True) as response,
        ):
            async for line in response.content:
                event = line.decode().strip().removeprefix("data: ")
                if not event or event == "[DONE]":
                    continue
                told = json.loads(event)
                if is_closed(told):
                    return Generated([], "abort", [])
                if is_rejected(told):
                    return None
                [choice] = told["choices"]
                tokens += choice["token_ids"]
                if watch is not None:
                    await watch.note(len(choice["token_ids"]))
        spans = [
            (parse_version(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"]
        ]
        return Generated(tokens, choice["finish_reason"], spans)

    def reference(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], count: int
    ) -> list[int]:
        return self.checkpoint.greedy(weights, prompt, count)

    def score(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], tokens: Sequence[int]
    ) -> list[float]:
        return self.checkpoint.score(weights, prompt, tokens)

    def other_weights(self, seed: int) -> dict[str, Tensor]:
        return perturbed(self.weights, seed)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plugin")
    told = {API_KEY_VARIABLE: API_KEY, "FORWARDED_ALLOW_IPS": "*"}
    return {**os.environ, **boot_environment(folder, rest_ms=REST_MS), **told}


@pytest.fixture(scope="module")
def under_test(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Iterator[Served]:
    """One server for the module, of a checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("vllm")
    checkpoint = make_checkpoint(folder / "model", seed=1, max_positions=MAX_POSITIONS)
    with asyncio.Runner() as runner:
        argv = server_argv(checkpoint.folder, "--host", "0.0.0.0")
        server = SupervisedServer(argv, env=environment)
        served = Served(server, checkpoint, runner)
        info = runner.run(served.engine.start())
        endpoint = server.base_url.replace("127.0.0.1", "0.0.0.0")
        assert (info.kind, info.endpoint, info.workers) == ("vllm-http", endpoint, 1)
        served.limits = info.limits
        try:
            yield served
        finally:
            runner.run(served.engine.close())


@pytest.fixture
def routes(under_test: Served) -> Routes:
    """vLLM's V1 model runner has a generator for each request, so that seeds start anew."""
    limits = RequestLimits(VOCABULARY, MAX_POSITIONS, 8, exact_seeds=False)
    assert under_test.limits == limits
    url = under_test.server.base_url
    version = under_test.version
    return Routes(under_test.engine, url, limits, version, bodies("tiny"), "/pause", under_test.run)


class TestDataRoutes(DataRoutesContract):
    """vLLM's own, behind the middleware that keeps its RL routes to this host."""


class TestContract(EngineContract):
    """The contract that every engine adapter keeps."""


class TestStaged(StagedContract):
    """Through the workers' staging channels, and the core's swap over HTTP."""


class TestOnTheBus(BusContract):
    """Served: broker, sidecar and trainer around a real API server."""


def test_live_update_matches_transformers(under_test: Served) -> None:
    """Two requests are running, one streamed and one not; both end whole, split by version."""
    new, version = under_test.other_weights(51), under_test.version

    async def scenario() -> None:
        old = under_test.weights
        watch = Watch()
        streamed = asyncio.create_task(under_test.generate((1, 2, 3), 200, watch=watch))
        body = {
            "token_ids": [4, 5, 6],
            "sampling_params": {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True},
        }
        url = f"{under_test.server.base_url}/inference/v1/generate"
        async with aiohttp.ClientSession(headers=KEYED) as session:
            at_once = asyncio.create_task(session.post(url, json=body))
            await watch.reached(20)
            await paused_update(under_test.engine, new, version + 1)
            async with await at_once as response:
                [choice] = (await response.json())["choices"]
        result = await streamed
        whole = Generated(
            choice["token_ids"],
            choice["finish_reason"],
            [
                (parse_version(s["version"]), s["start"], s["end"])
                for s in choice["weight_versions"]
            ],
        )
        for got, prompt in ((result, (1, 2, 3)), (whole, (4, 5, 6))):
            assert (len(got.tokens), got.finish_reason) == (200, "length")
            (first, start, cut), (second, again, end) = got.weight_versions
            assert (first, second, start, again, end) == (version, version + 1, 0, cut, 200)
            assert got.tokens[:cut] == under_test.oracle.greedy(old, cut, prompt)
            so_far = (*prompt, *got.tokens[:cut])
            assert got.tokens[cut:] == under_test.oracle.greedy(new, 200 - cut, so_far)
        under_test.weights, under_test.version = new, version + 1

    under_test.run(scenario())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_request_that_comes_in_a_pause(under_test: Served, mode: PauseMode) -> None:
    """`keep` queues it. So do `wait` and `abort`, or else they reject it with HTTP 503, and it may
    be sent again: as the vLLM at hand does. A closed admission rejects it in each mode, with the
    reason, on every route."""
    engine = under_test.engine
    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    body = {"token_ids": [4, 5, 6], "sampling_params": sampling}
    root = under_test.server.base_url
    url = f"{root}/inference/v1/generate"

    async def scenario() -> None:
        async def answer() -> tuple[int, Any]:
            async with session.post(url, json=body) as response:
                return response.status, await response.json()

        async with aiohttp.ClientSession(headers=KEYED) as session:
            await engine.pause(mode, clear_cache=True)
            asked = asyncio.create_task(answer())
            rejects = mode != "keep" and under_test.rejects
            if rejects:
                status, told = await asked
                assert (status, is_rejected(told)) == (HTTPStatus.SERVICE_UNAVAILABLE, True)
            while await engine.in_flight() != (not rejects):  # noqa: ASYNC110
                await asyncio.sleep(AGAIN_S)
            await engine.admit(open=False)
            completion = {"model": "tiny", "prompt": [4, 5, 6], "max_tokens": 8}
            for path, how in (("inference/v1/generate", body), ("v1/completions", completion)):
                async with session.post(f"{root}/{path}", json=how) as response:
                    told = await response.json()
                assert (response.status, is_closed(told)) == (HTTPStatus.SERVICE_UNAVAILABLE, True)
                assert told["error"]["type"] == "ServiceUnavailableError"
                assert "weights" in told["error"]["message"]
            await engine.admit(open=True)
            await engine.resume()
            for served in (await answer(), *([] if rejects else [await asked])):
                assert served[0] == HTTPStatus.OK
                assert served[1]["choices"][0]["token_ids"] == under_test.oracle.greedy(
                    under_test.weights, 8, (4, 5, 6)
                )

    under_test.run(asyncio.wait_for(scenario(), under_test.wait_s))


def test_a_second_adapter_is_refused(under_test: Served) -> None:
    """And so is another coordinator than the engine has. The first adapter drives on."""

    async def scenario() -> None:
        url = under_test.server.base_url
        for second, why in (
            (VllmAdapter(HttpConnection(url, api_key=API_KEY)), "another sidecar of this host"),
            (VllmAdapter(HttpConnection(url, api_key=API_KEY), "bus"), "its own coordinator"),
        ):
            with pytest.raises(EngineError, match=why):
                await second.start()
            await second.close()
        assert await under_test.engine.version() == under_test.version

    under_test.run(scenario())


def test_what_runs_is_told_from_inside(under_test: Served) -> None:
    """The core's status page, and the ids of requests."""

    async def scenario() -> None:
        engine = under_test.engine
        watch = Watch()
        request = asyncio.create_task(under_test.generate((1, 2, 3), 300, watch=watch))
        await watch.reached(5)
        [name] = await engine.request_ids()
        assert name
        view = engine.core_view()
        assert view is not None
        assert (view.rank, view.running, view.waiting) == (0, 1, 0)
        await request
        later = engine.core_view()
        assert later is not None
        assert later.step >= view.step
        while await engine.request_ids():  # workers let it go with a step that follows its last
            pass

    under_test.run(asyncio.wait_for(scenario(), under_test.wait_s))


# The server dies here: this test stays the last one that uses it.
def test_death_is_reported_and_nothing_is_left(under_test: Served) -> None:
    """The engine core is killed. Every call from then on says so, whatever text vLLM answers with;
    the server ends, and its workers with it."""
    engine = under_test.engine

    async def scenario() -> None:
        guard = under_test.server.pid
        [api_server] = children(guard)
        family = [api_server, *descendants(api_server)]
        assert len(family) >= 3
        view = engine.core_view()
        assert view is not None
        death = asyncio.create_task(engine.died())
        os.kill(view.pid, signal.SIGKILL)
        assert await death
        calls = (
            engine.version(),
            engine.pause("keep", clear_cache=True),
            engine.resume(),
            engine.clear_cache(),
            engine.admit(open=True),
            engine.commit(under_test.version + 1),
        )
        for failed in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failed, EngineDead), failed
        await gone(family)
        with pytest.raises(EngineDead):
            await engine.version()

    under_test.run(asyncio.wait_for(scenario(), under_test.wait_s))


@pytest.mark.slow
def test_a_server_that_cannot_boot_says_why(environment: dict[str, str], tmp_path: Path) -> None:
    """Its exit code and last lines are in the error."""

    async def scenario() -> None:
        server = SupervisedServer(server_argv(tmp_path / "no-such-model"), env=environment)
        with pytest.raises(EngineError, match="no-such-model") as failed:
            await server.start()
        assert failed.value.code is NackCode.ENGINE_DEAD
        assert "exit code 1" in failed.value.detail

    asyncio.run(scenario())


SUPERVISOR = """
import asyncio, sys
from sidecar._supervision.server import SupervisedServer

async def main():
    server = SupervisedServer(sys.argv[1:])
    start = asyncio.create_task(server.start())
    await asyncio.sleep(0)
    print(server.pid, flush=True)
    await start

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_killed_supervisor_takes_its_server_along(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """SIGKILL, while a real server boots and has started its engine core."""
    make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)

    async def scenario() -> None:
        supervisor = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            SUPERVISOR,
            *server_argv(tmp_path / "model"),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert supervisor.stdout is not None
        assert supervisor.stderr is not None
        guard = int(await supervisor.stdout.readline())
        while b"EngineCore pid=" not in (line := await supervisor.stderr.readline()):
            assert line, "the server ended before its engine core was there"
        family = [guard, *descendants(guard)]
        assert len(family) >= 3
        supervisor.kill()
        await supervisor.wait()
        await gone(family)

    asyncio.run(asyncio.wait_for(scenario(), 600))


async def gone(pids: list[int]) -> None:
    """Wait until none of the processes runs; fails after a while."""
    with anyio.fail_after(60):
        while any(runs(pid) for pid in pids):  # noqa: ASYNC110 - the kernel offers no event
            await anyio.sleep(0.1)
