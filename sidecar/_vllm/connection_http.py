"""Connects to a vLLM API server through its RL routes (``/pause``, ``/collective_rpc`` ...).

The server's API key does not protect those routes (vLLM 0.32 guards only ``/v1`` and
``/inference``), so they belong on loopback: a sidecar runs beside its server.

Calls have no read timeout: a pause ends when the engine is idle, and a call that was cancelled here
would still be pending in the server. Only connecting, and requests that a live server answers at
once, have timeouts here. All other deadlines belong to the caller.

Each call has a connection of its own. A server may close a connection that is kept alive at the
moment when the next call is sent, and that call would be lost. A call that could not be written to
its connection has not reached the server, and is sent again. If a connection breaks later,
``/health`` shows whether the engine is dead.
"""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import anyio

import bus.log
from bus._net import check_url, is_loopback_host
from bus.errors import EngineDead, EngineError, UsageError
from bus.messages import ProbeResult
from sidecar._vllm.lora_routes import AdapterRoutes
from sidecar._vllm.plugin import worker_rpc
from sidecar._vllm.plugin.operations import engine_error, find_failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aiohttp.abc import AbstractStreamWriter

    from bus.messages import PauseMode
    from sidecar._supervision.server import SupervisedServer

CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0
HEALTH_PERIOD_S: Final = 1.0
REFUSALS_TO_DIE: Final = 3
REQUEST_IDS_S: Final = 1.0
_SENDINGS: Final = 3  # of a call that does not reach the server
_ASK_EVERY_S: Final = 0.5
# How often a start logs that it waits for the server.
_WARN_EVERY_S: Final = 10.0

_GENERATE: Final = "/inference/v1/generate"

# Both gauges count requests of every route, per engine; a frozen request is running or waiting.
# Several API servers show no value before the first request.
_GAUGE = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.eE+]+)$", re.MULTILINE)
_COUNTS: Final = "# TYPE vllm:num_requests_running gauge"


class VllmHttpClient:
    """Sends HTTP requests to one vLLM server, each over a connection of its own.

    Args:
        url: the server's URL, without a slash at its end.
        api_key: the key that the server requires from clients; empty for none.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self._session: aiohttp.ClientSession | None = None

    async def close_session(self) -> None:
        """Closes the session, which ends every running call."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(
        self, path: str, body: Any = None, *, query: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Sends one POST request without a time limit, and returns the JSON answer.

        Args:
            path: the route, such as ``/pause``.
            body: the request's body, sent as JSON.
            query: the parameters in the URL.

        Raises:
            EngineDead: the connection was refused or broke, or the server's engine is dead.
            EngineError: the server reports an error; with the server's or the plugin's text.
        """
        return await self._json("POST", path, body=body, query=query)

    async def status_of(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Sends one request; an error status is returned, not raised.

        Args:
            method: the HTTP method.
            path: the route.
            body: the request's body, sent as JSON.

        Returns:
            The status and the text of the answer.

        Raises:
            EngineDead: the connection was refused or broke.
        """
        async with self._response(method, path, body=body) as response:
            return response.status, await response.text()

    async def _json(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        async with self._answer(method, path, **how) as response:
            answer: dict[str, Any] = await response.json()
            return answer

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, **how: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._response(method, path, **how) as response:
            if not response.ok:
                raise await self._failure(path, response.status, await response.text())
            yield response

    async def _failure(self, path: str, status: int, text: str) -> EngineError:
        """Returns the exception for an answer with an error status.

        ``/health`` shows whether the engine is dead. The answer's text can't: it differs between
        releases of vLLM, and newer ones (0.33) hide the cause from clients.
        """
        if status == HTTPStatus.NOT_FOUND:
            return EngineError(
                f"the server has no {path}: start the server with VLLM_SERVER_DEV_MODE=1 "
                "(it brings the RL routes), bound to 127.0.0.1"
            )
        if find_failure(text) is not None:
            return engine_error(text)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and await self._is_dead():
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
            for left in reversed(range(_SENDINGS)):
                data = None if body is None else _Body(body)
                try:
                    sent = await self._http.request(
                        method, self._url + path, data=data, params=query, timeout=timeout
                    )
                    break
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                    raise
                except aiohttp.ClientConnectionError:
                    if not left or data is None or data.is_written:
                        raise
            async with sent as response:
                yield response
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineError(f"{self._url}{path}: no connection in {CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise EngineError(f"{self._url}{path}: no answer in {timeout_s} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            text = f"{self._url}{path}: {error or type(error).__name__}"
            if isinstance(error, aiohttp.ClientConnectorError) or await self._is_dead():
                raise EngineDead(text) from error
            raise EngineError(
                f"{text}; the server lives, and may have executed the call"
            ) from error

    async def wait_until_healthy(self, limit_s: float) -> None:
        """Waits until the server's ``/health`` reports that it can take requests.

        Args:
            limit_s: time limit in seconds. The log names the server every 10 s meanwhile.

        Raises:
            EngineError: the server is not healthy in time.
        """
        last = "no answer yet"
        warn_s = 0.0
        with anyio.move_on_after(limit_s):
            while True:
                try:
                    status = await self._health()
                except aiohttp.ClientConnectorError as error:
                    last = error.os_error.strerror or str(error)
                except (aiohttp.ClientError, TimeoutError) as error:
                    last = str(error) or type(error).__name__
                else:
                    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
                        return
                    last = f"/health answers {status}"
                if anyio.current_time() >= warn_s:
                    warn_s = anyio.current_time() + _WARN_EVERY_S
                    bus.log.logger().warning("engine_not_healthy", url=self._url, detail=last)
                await anyio.sleep(_ASK_EVERY_S)
        raise EngineError(f"no healthy server at {self._url} within {limit_s:g} s: {last}")

    async def _health(self) -> int:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        async with self._http.get(f"{self._url}/health", timeout=timeout) as response:
            return response.status

    async def _is_dead(self) -> bool:
        """Returns whether the server reports a dead engine, or does not listen any more."""
        try:
            return await self._health() == HTTPStatus.SERVICE_UNAVAILABLE
        except TimeoutError:
            return False
        except aiohttp.ClientConnectionError:
            return True

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # With a limit on connections, waiting calls could delay a resume.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), headers=self._headers
            )
        return self._session


class _Body(aiohttp.BytesPayload):
    """A request's body in JSON; until ``is_written``, the server can't have all of it."""

    def __init__(self, body: Any) -> None:
        super().__init__(json.dumps(body).encode(), content_type="application/json")
        self.is_written = False

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        await super().write_with_length(writer, content_length)
        self.is_written = True


class HttpConnection(VllmHttpClient):
    """Makes vLLM's calls through an API server, for :class:`sidecar._vllm.engine.VllmAdapter`.

    Calls raise :class:`EngineError`, or :class:`EngineDead` if the connection is refused or breaks.

    Args:
        base_url: the URL of a running server, such as ``http://127.0.0.1:8000``; a path prefix is
            kept. Empty if ``server`` is given.
        server: a server that this connection starts, and stops when it is closed; None for a
            running one.
        ready_timeout_s: how long :meth:`open` waits for ``/health``, in seconds.
        api_key: the key that the server requires from clients. Ignored with ``server``.
        allow_remote: accepts a URL that is not on loopback, where the RL routes are not protected.

    Raises:
        UsageError: both ``base_url`` and ``server`` are given, or neither is; or the URL is not an
            HTTP URL, or not on loopback.
    """

    kind = "vllm-http"
    is_served = is_shared = True

    def __init__(
        self,
        base_url: str = "",
        *,
        server: SupervisedServer | None = None,
        ready_timeout_s: float = 600.0,
        api_key: str = "",
        allow_remote: bool = False,
    ) -> None:
        if bool(base_url) == (server is not None):
            raise UsageError("give either base_url or server, and not both")
        url = (server.base_url if server is not None else base_url).rstrip("/")
        api_key = server.prepared.api_key if server is not None else api_key
        super().__init__(url, api_key)
        self._endpoint = server.prepared.endpoint if server is not None else self._url
        host = check_url(self._url).hostname or ""
        self.is_local = server is not None or is_loopback_host(host)
        if not allow_remote and not self.is_local:
            raise UsageError(
                f"{host} is not a loopback address, and the server's API key does "
                "not cover its RL routes: any client that reaches the server can pause it and "
                "replace its weights. Run the sidecar beside the server, bound to 127.0.0.1, or "
                "pass allow_remote=True on a network that only you can reach"
            )
        self.name = f"the server at {self._url}"
        self.ends_with_sidecar = server is not None
        self.server = server
        self._has_died = False
        self._ready_timeout_s = ready_timeout_s
        adapters = AdapterRoutes(self.status_of, self._url)
        self.check_adapter = adapters.check
        self.load_adapter = adapters.load
        self.undo_adapter = adapters.undo
        self.remove_adapter = adapters.remove

    async def open(self) -> None:
        """Waits until the server is healthy; a supervised server is started first.

        Raises:
            EngineError: the server isn't healthy in time.
            EngineDead: the supervised server has ended.
        """
        if self.server is not None:
            await self.server.start()
        try:
            await self.wait_until_healthy(self._ready_timeout_s)
        except BaseException:
            await self.close_session()
            raise

    async def close(self) -> None:
        """Closes the session, and stops a supervised server."""
        await self.close_session()
        if self.server is not None:
            await self.server.stop(at_once=self._has_died)

    async def died(self, on_look: Callable[[], None]) -> str:
        """Waits until the server ends, stops listening or reports a dead engine; returns which.

        A server that is slow to answer is busy, not dead. ``on_look`` is called before each check.
        """
        reasons: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def first(wait: Callable[[], Awaitable[str]]) -> None:
                reasons.append(await wait())
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, lambda: self._watch_health(on_look))
            if self.server is not None:
                tasks.start_soon(first, self.server.wait_for_exit)
        self._has_died = True
        return reasons[0]

    async def _watch_health(self, on_look: Callable[[], None]) -> str:
        refusals = 0
        while True:
            on_look()
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
                if status == HTTPStatus.SERVICE_UNAVAILABLE:
                    return f"the server at {self._url} says that its engine is dead (/health 503)"
            await anyio.sleep(HEALTH_PERIOD_S)

    async def software_version(self) -> str:
        return str((await self._json("GET", "/version", timeout_s=ANSWER_S))["version"])

    async def config(self) -> dict[str, Any]:
        """Returns vLLM's configuration, as nested dicts; the first call takes seconds."""
        answer = await self._json("GET", "/server_info?config_format=json")
        config: dict[str, Any] = answer["vllm_config"]
        return config

    async def accepts_probes(self) -> bool:
        """Returns whether the server can run a canary's probes.

        Probes are requests with token ids as the prompt, which need the token-in, token-out route.

        Raises:
            EngineError: the server counts no requests, so that a pause could not report them.
        """
        await self._gauges()
        status, _ = await self.status_of("POST", _GENERATE, {})  # an empty body is refused
        return status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)

    async def endpoint(self) -> str:
        """Returns the URL for clients."""
        return self._endpoint

    async def in_flight(self, seen: int | None) -> int:
        """Returns how many requests the server has, over all its routes.

        ``seen`` is the count on the core's status page, which is returned as it is. If ``seen`` is
        None, the count comes from ``/metrics``, which takes the server milliseconds during a pause.
        The gauges of ``/metrics`` stay correct during a pause, also after requests are aborted in
        the pause (seen on 0.32); they lag behind the engine by one step. ``/load`` counts only some
        routes, and nothing without an option of its own.
        """
        return await self._gauges() if seen is None else seen

    async def _gauges(self) -> int:
        async with self._answer("GET", "/metrics", timeout_s=ANSWER_S) as response:
            text = await response.text()
        if _COUNTS not in text:
            raise EngineError(f"{self._url}/metrics counts no requests: omit --disable-log-stats")
        return int(sum(map(float, _GAUGE.findall(text))))

    async def request_ids(self) -> tuple[str, ...]:
        """Returns the ids of requests that have begun, as clients chose them.

        The result is empty if the core has not answered after 1 s, for example because it hangs in
        a collective. Workers still list a request that has ended until their next step.
        """
        with anyio.move_on_after(REQUEST_IDS_S):
            try:
                return worker_rpc.read_requests(await self.ask(worker_rpc.ASK_REQUESTS))
            except EngineError:
                pass
        return ()

    async def weight_version(self) -> str:
        """Returns the text in which vLLM stores the version of its weights."""
        answer = await self._json("GET", "/weight_info", timeout_s=ANSWER_S)
        return str(answer["weight_version"])

    async def set_weight_version(self, version: str) -> None:
        """Sets the text in which vLLM stores the version of its weights."""
        await self.post("/update_weight_version", {"new_version": version})

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pauses the engine by vLLM's route ``/pause``; returns when the engine is idle."""
        query = {"mode": mode, "clear_cache": "true" if clear_cache else "false"}
        await self.post("/pause", query=query)

    async def resume(self) -> None:
        """Resumes the engine by vLLM's route ``/resume``."""
        await self.post("/resume")

    async def wake_up(self) -> None:
        """Allocates freed memory and resumes the engine, by vLLM's route ``/wake_up``."""
        await self.post("/wake_up")

    async def abort_requests(self) -> int:
        """Ends the requests of the front end that takes the call; returns how many."""
        return int((await self.post("/abort_requests", {}))["aborted"])

    async def reset_caches(self) -> bool:
        """Drops all caches by vLLM's own routes.

        Returns:
            False if some of the prefix cache is in use; the other caches are kept then, too.
        """
        query = {"reset_running_requests": "true"}
        if not (await self.post("/reset_prefix_cache", query=query)).get("success"):
            return False
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            status, text = await self.status_of("POST", path)
            if status != HTTPStatus.OK:
                raise EngineError(f"{path} answered {status}: {text[:256]}")
        return True

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> ProbeResult:
        """Runs one probe: a request with greedy sampling that ignores end-of-sequence tokens.

        The cores recognise a probe by its ``request_id``. ``salt`` is the prefix cache's salt.
        """
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

    async def ask(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        """Calls a method of the workers or the core, by vLLM's ``collective_rpc``.

        Args:
            method: one of :mod:`sidecar._vllm.plugin.worker_rpc`, or of vLLM's own.
            kwargs: the method's arguments.

        Returns:
            A list with each worker's answer; for methods that the core answers, with the core's.
        """
        body = {"method": method, "kwargs": kwargs or {}}
        return (await self.post("/collective_rpc", body)).get("results")
