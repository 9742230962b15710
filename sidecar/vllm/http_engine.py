"""Drive a vLLM API server through its RL routes.

Those routes are not covered by the server's API key (vLLM 0.32 guards only ``/v1``
and ``/inference``), so they belong on loopback: a sidecar runs beside its server.

No call has a read timeout: a pause ends when the engine is idle, and a call that was
given up here would still be pending there. Deadlines are the business of whoever
calls; only connecting, and the questions that a live server answers at once, are
bounded here.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp
import anyio

from bus.errors import EngineDead, EngineError, UsageError
from bus.lora import adapter_of
from bus.net import is_loopback_host
from bus.vllm_versions import require_supported
from sidecar.engine import (
    START_ANSWER_S,
    EngineInfo,
    PauseMode,
    ProbeResult,
    RankAssignment,
    answers_within,
)
from sidecar.vllm.connection_http import (
    SERVER_ERROR,
    HttpConnection,
    HttpSessions,
    wait_until_healthy,
)
from sidecar.vllm.core_state import CoreLink, check_ranks, parse_version, server_info
from sidecar.vllm.lora_routes import AdapterRoutes
from sidecar.vllm.plugin import worker_rpc
from sidecar.vllm.plugin.compat import check_backend
from sidecar.vllm.plugin.operations import find_failure
from sidecar.vllm.worker_client import AdapterBase, engine_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sidecar.supervision.server import SupervisedServer
    from sidecar.vllm.plugin.environment import DpCoordinator

CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0
HEALTH_PERIOD_S: Final = 1.0
REFUSALS_TO_DIE: Final = 3
ABORT_SEEN_S: Final = 1.0
REQUEST_IDS_S: Final = 1.0
OK: Final = 200
NOT_FOUND: Final = 404
UNAVAILABLE: Final = 503
BAD_BODY: Final = (400, 422)

_GENERATE: Final = "/inference/v1/generate"

# Both count requests of every route, per engine; a frozen request is running or waiting. Of several
# API servers, no value is shown before the first request.
_GAUGE = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.eE+]+)$", re.MULTILINE)
_COUNTS: Final = "# TYPE vllm:num_requests_running gauge"


class VllmHttpEngine(AdapterBase):
    """An API server as a :class:`sidecar.engine.Engine`.

    Args:
        base_url: such as ``http://127.0.0.1:8000``; a path prefix is kept. With
            ``server``, its own URL.
        server: a server that this adapter starts, and stops when it is closed.
        ready_timeout_s: how long :meth:`start` waits for ``/health``.
        api_key: what the server asks its clients for; with ``server``, its own.
        allow_remote: take a URL that is not on loopback.
        dp_coordinator: ``bus`` insists that the bus coordinates the server's DP group;
            see :mod:`sidecar.vllm.plugin.environment` for how it comes to.

    Raises:
        UsageError: neither or both of ``base_url`` and ``server``; not an HTTP URL; or
            not on loopback.
    """

    def __init__(
        self,
        base_url: str = "",
        *,
        server: SupervisedServer | None = None,
        ready_timeout_s: float = 600.0,
        api_key: str = "",
        allow_remote: bool = False,
        dp_coordinator: DpCoordinator = "vllm",
    ) -> None:
        if bool(base_url) == (server is not None):
            raise UsageError("give either base_url or server")
        self._url = (server.base_url if server is not None else base_url).rstrip("/")
        self.endpoint = server.prepared.endpoint if server is not None else self._url
        self._api_key = server.prepared.api_key if server is not None else api_key
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"base_url={base_url!r}: expected such as http://127.0.0.1:8000")
        self._is_local = server is not None or is_loopback_host(parts.hostname)
        if not allow_remote and not self._is_local:
            raise UsageError(
                f"{parts.hostname} is not a loopback address, and the server's API key does "
                "not cover its RL routes: whoever reaches it can pause it and replace its "
                "weights. Run the sidecar beside the server, bound to 127.0.0.1, or pass "
                "allow_remote=True on a network that only you can reach"
            )
        self._server = server
        self._ready_timeout_s = ready_timeout_s
        self._adapters = AdapterRoutes(self.status_of, self._url)
        super().__init__(CoreLink(dp_coordinator), HttpConnection(self.post, self._adapters))
        self._connections: HttpSessions | None = None

    async def start(self) -> EngineInfo:
        """Start the server if it is ours; wait for it; check that it can be driven.

        Raises:
            EngineError: it isn't healthy in time, is too old, or lacks the RL routes or
                the backend, or has another coordinator; the text says how to start it.
            EngineDead: a server that we started ended.
        """
        if self._server is not None:
            await self._server.start()
        if self._connections is None:
            self._connections = HttpSessions(CONNECT_S, self._api_key)
        await wait_until_healthy(self._health, self._url, self._ready_timeout_s)
        with answers_within(START_ANSWER_S, f"the engine core of {self._url}"):
            return await self._read_info()

    async def _read_info(self) -> EngineInfo:
        """Check that a healthy server can be driven."""
        version = str((await self._ask("/version"))["version"])
        require_supported(version)
        config = await self._config()
        backend = str((config.get("weight_transfer_config") or {}).get("backend", ""))
        who = f"the server at {self._url}"
        check_backend(backend, who)
        # Asked before any call of the plugin's: without it, that would fail in all workers.
        worker_rpc.check_drives(await self._ask_workers(worker_rpc.ASK_PRESENCE), backend, who)
        parallel = config["parallel_config"]
        check_ranks(
            who,
            hybrid=bool(parallel.get("data_parallel_hybrid_lb")),
            elastic=bool(parallel.get("enable_elastic_ep")),
        )
        cores = 1 if parallel["data_parallel_external_lb"] else int(parallel["data_parallel_size"])
        facts = worker_rpc.read(await self._ask_workers(worker_rpc.ASK_FACTS))
        await self._plugin.hello(facts, cores=cores)
        await self._gauges()  # fails here rather than later, if nothing is counted
        await self._admission.look()
        draft = worker_rpc.read_draft(await self._ask_workers(worker_rpc.ASK_DRAFT))
        probes = self._admission.is_supported and await self._accepts_token_ids()
        info = replace(
            server_info(config, version, self.endpoint, backend, draft=draft),
            canary="abort" if probes else "",
            closed=self._admission.found_closed,
            booted_closed=self._admission.booted_closed,
            ends_with_sidecar=self._server is not None,
            features=facts.features,
            limits=facts.limits_of(cores),
            kv_connectors=self._plugin.caches.connectors,
        )
        self._core.learn(facts, info, cores=cores, here=self._is_local)
        return info

    async def close(self) -> None:
        """Close the connections, and stop the server if we started it."""
        self._plugin.close()
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()
        if self._server is not None:
            await self._server.stop()

    async def died(self) -> str:
        """Return when the server is gone: it ended, says so itself, or nothing listens.

        A server that is slow to answer is busy, not dead.
        """
        reasons: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def first(wait: Callable[[], Awaitable[str]]) -> None:
                reasons.append(await wait())
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, self._watch_health)
            if self._server is not None:
                tasks.start_soon(first, self._server.wait_for_exit)
        return reasons[0]

    async def _watch_health(self) -> str:
        """Ask for its health until it is dead."""
        refusals = 0
        while True:
            self._core.check_coordinator()
            try:
                status = await self._health()
            except aiohttp.ClientConnectorError as error:
                refusals += 1
                if refusals >= REFUSALS_TO_DIE:
                    return f"nothing listens at {self._url}: {error.os_error.strerror or error}"
            except (aiohttp.ClientError, TimeoutError):
                refusals = 0
            else:
                refusals = 0
                if status == UNAVAILABLE:
                    return f"the server at {self._url} says that its engine is dead (/health 503)"
            await anyio.sleep(HEALTH_PERIOD_S)

    async def in_flight(self) -> int:
        """Running and waiting requests of every route: from the core's status page, or else
        from ``/metrics``, which takes the server milliseconds that a pause waits for.

        ``/load`` counts only some routes, and nothing without an option of its own. The
        gauges hold through a pause, and follow an abort in it (seen on 0.32); they lag
        behind the engine by one of its steps.
        """
        seen = self._core.requests()
        return await self._gauges() if seen is None else seen

    async def _gauges(self) -> int:
        async with self._answer("GET", "/metrics", timeout_s=ANSWER_S) as response:
            text = await response.text()
        if _COUNTS not in text:
            raise EngineError(f"{self._url}/metrics counts no requests: omit --disable-log-stats")
        return int(sum(map(float, _GAUGE.findall(text))))

    async def request_ids(self) -> tuple[str, ...]:
        """Of the requests that have begun; workers know until their next step of one that has
        ended. A core that stands in a collective is not waited for: then there are none to be
        told."""
        with anyio.move_on_after(REQUEST_IDS_S):
            try:
                return worker_rpc.read_requests(await self._ask_workers(worker_rpc.ASK_REQUESTS))
            except EngineError:
                pass
        return ()

    async def version(self) -> int:
        return parse_version(str((await self._ask("/weight_info"))["weight_version"]))

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        clear = self._plugin.caches.clears(clear_cache)
        query = {"mode": mode, "clear_cache": "true" if clear else "false"}
        await self.post("/pause", query=query)

    async def resume(self) -> None:
        await self.post("/resume")

    async def wake(self) -> None:
        await self._ask_workers("wake_up", {"tags": None})
        await self.post("/wake_up")

    async def abort_requests(self) -> int:
        """As in the protocol; returns when it is seen as well, at most a second later. Of several
        front ends of a server, each could end its own requests alone."""
        ended = await self._admission.end_requests()
        if ended is None:  # its cores can't
            ended = int((await self.post("/abort_requests", {}))["aborted"])
        with anyio.move_on_after(ABORT_SEEN_S):
            while await self.in_flight():  # noqa: ASYNC110 - no event tells it
                await anyio.sleep(ABORT_SEEN_S / 50)
        return ended

    async def clear_cache(self) -> None:
        if await self._plugin.caches.clear():
            return
        query = {"reset_running_requests": "true"}
        if not (await self.post("/reset_prefix_cache", query=query)).get("success"):
            raise EngineError("vLLM could not drop its prefix cache: some of it is in use")
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            status, text = await self.status_of("POST", path)
            if status != OK:
                raise EngineError(f"{path} answered {status}: {text[:256]}")

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:
        prefetch_depth = await self._plugin.open_transfer(backend, params, place)
        if adapter := adapter_of(backend):
            await self._adapters.open(adapter, params)
        return prefetch_depth

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        salt: str,
        *,
        mode: PauseMode,
        clear_cache: bool,
    ) -> tuple[ProbeResult, ...]:
        return await self._admission.probe(
            self, prompts, max_tokens, salt, mode=mode, clear_cache=clear_cache
        )

    async def probe_one(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> ProbeResult:
        body = {
            "token_ids": prompt,
            "sampling_params": {
                "temperature": 0.0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "logprobs": 0,
            },
            "request_id": request_id,
            "cache_salt": salt,
        }
        choice = (await self.post(_GENERATE, body))["choices"][0]
        logprobs = [float(each["logprob"]) for each in choice["logprobs"]["content"]]
        return ProbeResult(tuple(choice["token_ids"]), tuple(logprobs))

    async def _accepts_token_ids(self) -> bool:
        """Whether it takes token ids from us: a body that is none is found to be none."""
        status, _ = await self.status_of("POST", _GENERATE, {})
        return status in BAD_BODY

    async def commit(self, version: int) -> None:
        await self._plugin.settle()
        await self.post("/update_weight_version", {"new_version": str(version)})

    # -- HTTP --------------------------------------------------------------------------

    async def post(
        self, path: str, body: Any = None, *, query: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """One RL call, however long it takes.

        Raises:
            EngineDead: the connection was refused or broke.
            EngineError: what the server, or the plugin inside it, said.
        """
        async with self._answer("POST", path, body=body, query=query) as response:
            answer: dict[str, Any] = await response.json()
            return answer

    async def status_of(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """One call of a route that needs no plugin: how the server answers, whatever it says.

        Raises:
            EngineDead: the connection was refused or broke.
        """
        async with self._response(method, path, body=body) as response:
            if response.status >= SERVER_ERROR:
                self._open().on_failure()
            return response.status, await response.text()

    async def _ask(self, path: str) -> dict[str, Any]:
        async with self._answer("GET", path, timeout_s=ANSWER_S) as response:
            answer: dict[str, Any] = await response.json()
            return answer

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, **how: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._response(method, path, **how) as response:
            if not response.ok:
                self._open().on_failure()
                raise await self._failure(path, response.status, await response.text())
            yield response

    async def _failure(self, path: str, status: int, text: str) -> EngineError:
        """What an answer with an error status means.

        A dead engine is recognised by ``/health``. The text can't say it: it differs between
        releases of vLLM, and newer ones (0.33) keep the cause from clients.
        """
        if status == NOT_FOUND:
            return EngineError(
                f"the server has no {path}: start the server with VLLM_SERVER_DEV_MODE=1 "
                "(it brings the RL routes), bound to 127.0.0.1"
            )
        if find_failure(text) is not None:
            return engine_error(text)
        if status >= SERVER_ERROR and await self._is_dead():
            return EngineDead(f"{path}: the server's engine is dead")
        return EngineError(f"{path} answered {status}: {text[:2000]}")

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with (
                self._open().session() as session,
                session.request(
                    method, self._url + path, json=body, params=query, timeout=timeout
                ) as response,
            ):
                yield response
        except TimeoutError as error:
            raise EngineError(f"{self._url}{path}: no answer in {timeout_s} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EngineDead(f"{self._url}{path}: {error or type(error).__name__}") from error

    def _open(self) -> HttpSessions:
        if self._connections is None:
            raise EngineError("start() comes first")
        return self._connections

    async def _health(self) -> int:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        async with (
            self._open().session() as session,
            session.get(f"{self._url}/health", timeout=timeout) as response,
        ):
            return response.status

    async def _is_dead(self) -> bool:
        """Whether the server says that its engine is dead, or has ended with it."""
        try:
            return await self._health() == UNAVAILABLE
        except TimeoutError:
            return False
        except aiohttp.ClientConnectionError:
            return True

    async def _config(self) -> dict[str, Any]:
        """The server's whole configuration, by an RL route; the first time it takes seconds."""
        async with self._answer("GET", "/server_info?config_format=json") as response:
            config: dict[str, Any] = (await response.json())["vllm_config"]
            return config
