"""Serves HTTP handlers within limits, so that no client uses up what the others need.

The limits are the number of connections, the requests of one client at once, the time for a request
to arrive and for an answer to be read, and the number of values in a JSON body. ``http_access``
decides which requests are refused by their headers. Handlers interpret the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

import bus.log
from bus._net import http_url, is_loopback_host

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from aiohttp.typedefs import Handler

    from bus._runtime.http_access import HttpAccess

# How long a connection may take: for its first headers, a body, its next request, and to read.
HEADERS_S: Final = 10.0
BODY_S: Final = 60.0
IDLE_S: Final = 30.0
UNREAD_S: Final = 60.0
_NEVER_S: Final = 1e6  # aiohttp's own timer
# Decoding a value takes up to 0.1 µs, a list or an object up to 1 µs, and nothing else runs then.
MAX_VALUES: Final = 3_000_000
MAX_NESTED: Final = 500_000
# All bodies that are being read or answered may together have this many times the greatest size.
# Small ones don't count.
_BODIES_AT_ONCE: Final = 8
_SMALL: Final = 1 << 20  # bytes
_COUNTED_AT_ONCE: Final = 1 << 20  # bytes, in the event loop: less than a millisecond
# Of the descriptors that are free at the start, half are for clients: each may need an engine.
_KEPT_BACK: Final = 32
_FEWEST: Final = 4
_MOST: Final = 16_384
_REFUSED_AT_ONCE: Final = 64
_SPARED_S: Final = 1.0  # a connection this young may have sent a request
_LINGER_S: Final = 1.0
_LOG_EVERY_S: Final = 10.0
_SHUTDOWN_S: Final = 1.0
# How often the event loop turns until it calls the handler of a request that has arrived.
_PASSES: Final = 5
_FULL: Final = (
    b'{"error":{"message":"too many connections","type":"ServiceUnavailableError","code":503}}'
)
_FULL_ANSWER: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


class ClientRequests:
    """Counts each client's concurrent requests; an address counts as one client.

    Args:
        most: how many it may have; 0: any number.
        routes: the paths of the routes whose requests count.
    """

    def __init__(self, most: int = 0, routes: Collection[str] = ()) -> None:
        self.most = most
        self._routes = frozenset(routes if most else ())
        self._counts = Counter[str | None]()

    @contextlib.contextmanager
    def counted(self, client: str | None, route: str) -> Iterator[bool]:
        """Counts a request within the block; yields whether the client is within its limit."""
        if route not in self._routes:
            yield True
            return
        if self._counts[client] >= self.most:
            yield False
            return
        self._counts[client] += 1
        try:
            yield True
        finally:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]


class HttpServer:
    """Serves routes over HTTP, with limits for connections, clients and bodies.

    Args:
        routes: the routes and their handlers.
        answer_error: makes the answer from a request, a status and a text.
        answer_exception: makes the answer to an exception of a handler; None: a bug, which is
            logged and answered with status 500.
        max_body_bytes: the greatest size of a body.
        max_values: how many values the JSON of a body may have.
        access: decides which requests are refused by their headers.
        unread_s: how long a client may take to read what is to be sent, in seconds.
        requests: bounds the requests of each client; more get status 429.

    Attributes:
        limit: the greatest number of connections.
        refusals: the refused connections that get status 503; others are closed without an answer.
    """

    def __init__(
        self,
        routes: Sequence[web.RouteDef],
        answer_error: Callable[[web.Request, int, str], web.Response],
        answer_exception: Callable[[web.Request, Exception], web.Response | None],
        *,
        max_body_bytes: int,
        max_values: int = MAX_VALUES,
        access: HttpAccess,
        unread_s: float = UNREAD_S,
        requests: ClientRequests | None = None,
    ) -> None:
        self._app = web.Application(client_max_size=max_body_bytes, middlewares=[self._handle])
        self._app.add_routes(routes)
        self._answer_error = answer_error
        self._answer_exception = answer_exception
        self._access = access
        self._max_body_bytes = max_body_bytes
        self._held_bytes = 0  # of large bodies
        self._max_values = max_values
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._idle: dict[_Connection, float] = {}  # have no whole request; since when
        self.refusals: set[_Connection] = set()
        self._dropped = dict.fromkeys(("refused", "evicted", "slow", "limited"), 0)
        self._requests = requests or ClientRequests()
        self.unread_s = unread_s
        self._logged: asyncio.TimerHandle | None = None
        self.limit = 0

    @property
    def load(self) -> dict[str, int]:
        """Counts for the log and the status: open connections, their limit, and those dropped."""
        return {"connections": len(self._connections), "limit": self.limit, **self._dropped}

    async def start(self, host: str, port: int) -> str:
        """Begins to listen, and returns the base URL.

        Args:
            host: the host name or address to listen on.
            port: the port; 0 chooses a free one.

        Raises:
            OSError: the address can't be used.
        """
        self._is_local = is_loopback_host(host)
        self.limit = _connection_limit()
        # A handler is cancelled when its client goes away, and its request ends on the engine.
        self._runner = web.AppRunner(
            self._app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await self._runner.setup()
        # Many clients may connect at once, as with vLLM's server.
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self, self._runner), host, port, backlog=2048
        )
        at, port = self._server.sockets[0].getsockname()[:2]
        return http_url(at, port)

    async def close(self) -> None:
        """Stops listening; running answers have 1 s to end."""
        if self._logged is not None:
            self._logged.cancel()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for connection in [*self._connections, *self.refusals]:
            connection.abort()

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reads a whole request, calls its handler, and waits until the answer is sent."""
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.wait(None)
        response: web.StreamResponse | None = self._refuse(request)
        if response is None:
            counted = self._requests.counted(request.remote, _route(request))
            with counted as is_within, self._held(request) as has_room:
                if is_within and has_room:
                    response = await self._answer(request, connection, handler)
                else:
                    response = self._put_off(request, is_within=is_within)
        await response.prepare(request)
        await response.write_eof()
        self._expect(connection, IDLE_S)
        return response

    def _put_off(self, request: web.Request, *, is_within: bool) -> web.Response:
        """Returns the 503 or 429 for a request; ``is_within``: its client is within the limit."""
        status, text = 503, "the server is reading too many large bodies; try again"
        if not is_within:
            self.count("limited")
            status, text = 429, f"this client already has {self._requests.most} requests"
        response = self._answer_error(request, status, text)
        response.force_close()  # the body may be large
        response.headers["Retry-After"] = "1"
        return response

    def _refuse(self, request: web.Request) -> web.Response | None:
        """Returns the refusal of a request by its headers; None: it is not refused."""
        if request.match_info.http_exception is not None:
            return None
        if (request.content_length or 0) > self._max_body_bytes:
            text = f"the body has more than {self._max_body_bytes} bytes"
            response = self._answer_error(request, 413, text)
            response.force_close()
            return response
        refusal = self._access.refusal(
            *(request.method, _route(request), request.headers),
            has_body=request.body_exists,
            is_local=self._is_local,
        )
        return self._answer_error(request, *refusal) if refusal else None

    @contextlib.contextmanager
    def _held(self, request: web.Request) -> Iterator[bool]:
        """Counts a body until its request is answered; yields whether there is room for the body.

        A body of unknown length counts as one of the greatest size.
        """
        length = request.content_length
        if length is None:
            length = self._max_body_bytes if request.body_exists else 0
        if length <= _SMALL:
            yield True
            return
        if self._held_bytes + length > _BODIES_AT_ONCE * self._max_body_bytes:
            yield False
            return
        self._held_bytes += length
        try:
            yield True
        finally:
            self._held_bytes -= length

    async def _answer(
        self, request: web.Request, connection: _Connection, handler: Handler
    ) -> web.StreamResponse:
        try:
            async with asyncio.timeout(BODY_S):
                raw = await request.read()
        except TimeoutError:
            self.count("slow")
            response = self._answer_error(request, 408, f"the body did not arrive in {BODY_S:g} s")
            response.force_close()
            return response
        except web.HTTPException as error:
            return self._answer_error(request, error.status, error.text or error.reason)
        self._idle.pop(connection, None)
        if await _has_too_many_values(raw, self._max_values):
            return self._answer_error(
                request, 413, f"the body has more than {self._max_values} values"
            )
        try:
            return await handler(request)
        except web.HTTPException as error:
            return self._answer_error(request, error.status, error.text or error.reason)
        except RecursionError:
            return self._answer_error(request, 400, "the body is nested too deeply")
        except ConnectionError:  # the client's own
            raise
        except Exception as error:
            answer = self._answer_exception(request, error)
            if answer is None:
                bus.log.logger().exception("http_request_failed", path=request.path)
                answer = self._answer_error(request, 500, f"{type(error).__name__}: {error}")
            if request.writer.output_size:  # a part of another answer is sent
                raise ConnectionResetError from error
            return answer

    def admit(self, connection: _Connection) -> bool:
        """Admits a new connection; a full server first cuts off its longest idle one.

        Returns:
            Whether there is room. If not, the client gets status 503.
        """
        if len(self._connections) >= self.limit:
            now_s = asyncio.get_running_loop().time()
            oldest = next(iter(self._idle), None)
            if oldest is None or now_s - self._idle[oldest] < _SPARED_S:
                self.count("refused")
                if len(self.refusals) < _REFUSED_AT_ONCE:
                    self.refusals.add(connection)
                return False
            self.count("evicted")
            self.remove(oldest)
            oldest.abort()
        self._connections.add(connection)
        self._expect(connection, HEADERS_S)
        return True

    def remove(self, connection: _Connection) -> None:
        """Removes a connection that is lost."""
        self.refusals.discard(connection)
        self._idle.pop(connection, None)
        self._connections.discard(connection)

    def _expect(self, connection: _Connection, limit_s: float) -> None:
        if connection in self._connections:
            self._idle.pop(connection, None)  # becomes the last one
            self._idle[connection] = asyncio.get_running_loop().time()
            connection.wait(limit_s)

    def count(self, how: str) -> None:
        """Counts a dropped connection or limited request; logs the first, then every 10 s."""
        self._dropped[how] += 1
        if self._logged is None:
            self._log()

    def _log(self) -> None:
        bus.log.logger().warning(
            "http_connections_dropped",
            connections=len(self._connections),
            limit=self.limit,
            refused=self._dropped["refused"],
            evicted=self._dropped["evicted"],
            slow=self._dropped["slow"],
            limited=self._dropped["limited"],
        )
        before = sum(self._dropped.values())

        def again() -> None:
            self._logged = None
            if sum(self._dropped.values()) > before:
                self._log()

        self._logged = asyncio.get_running_loop().call_later(_LOG_EVERY_S, again)


class _Connection(web.RequestHandler):
    """A client's connection, which is cut off if the client is too slow."""

    def __init__(self, owner: HttpServer, runner: Any) -> None:
        self._owner = owner
        self._timer: asyncio.Handle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._raw: asyncio.Transport | None = None
        self._is_admitted = False
        loop = asyncio.get_running_loop()
        # Access refuses compressed bodies. Until it does, none of a body may be unpacked.
        options: dict[str, Any] = {"access_log": None, "keepalive_timeout": _NEVER_S}
        options["auto_decompress"] = False
        super().__init__(runner.server, loop=loop, **options)

    def wait(self, limit_s: float | None) -> None:
        """Cuts the connection off in ``limit_s``, unless called again before; None: never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._later(limit_s, self._check_slow) if limit_s is not None else None

    def abort(self) -> None:
        if self._raw is not None:
            self._raw.abort()

    def connection_made(self, transport: Any) -> None:
        """Admits the connection, or refuses it with status 503."""
        self._raw = transport
        self._is_admitted = self._owner.admit(self)
        if self._is_admitted:
            super().connection_made(transport)
        elif self in self._owner.refusals:
            transport.write(_FULL_ANSWER)
            with contextlib.suppress(OSError):
                transport.write_eof()
            # If closed before the request has arrived, the client would get a reset, no answer.
            self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self.abort)
        else:
            transport.abort()

    def log_exception(self, *args: Any, **how: Any) -> None:
        """Logs aiohttp's errors, except malformed requests and connections that clients broke."""
        if not isinstance(how.get("exc_info"), HttpProcessingError | ConnectionError):
            super().log_exception(*args, **how)

    def data_received(self, data: bytes) -> None:
        """Passes on what an admitted client sends."""
        if self._is_admitted:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the connection's request."""
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()
        self._owner.remove(self)
        if self._is_admitted:
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts the time limit of a client that does not read its answer."""
        super().pause_writing()
        self._unread = self._later(self._owner.unread_s, self._on_slow)

    def resume_writing(self) -> None:
        """Ends that time limit, because the client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _later(self, limit_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(limit_s, act)

    def _check_slow(self, passes: int = _PASSES) -> None:
        """Cuts the client off, unless its request arrived and only the event loop was late."""
        if passes:
            self._timer = asyncio.get_running_loop().call_soon(self._check_slow, passes - 1)
        else:
            self._on_slow()

    def _on_slow(self) -> None:
        self._owner.count("slow")
        self.abort()


def _route(request: web.Request) -> str:
    """Returns the route's own path, because a path may be spelled in several ways."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else ""


def _connection_limit() -> int:
    """Returns how many connections clients may have, by the descriptors that are free now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    with contextlib.suppress(OSError):
        soft -= sum(1 for _ in Path("/proc/self/fd").iterdir())
    return min(_MOST, max(_FEWEST, (soft - _KEPT_BACK) // 2))


async def _has_too_many_values(raw: bytes, most: int) -> bool:
    if len(raw) <= _COUNTED_AT_ONCE:
        nested, values = _count(raw)
    else:
        nested, values = await asyncio.to_thread(_count, raw)
    return nested > MAX_NESTED or values > most


def _count(raw: bytes) -> tuple[int, int]:
    """Returns upper bounds of a JSON body's lists and objects, and of its values."""
    nested = values = 0
    for start in range(0, len(raw), _COUNTED_AT_ONCE):  # other threads run in between
        part = start, start + _COUNTED_AT_ONCE
        nested += raw.count(b"[", *part) + raw.count(b"{", *part) + raw.count(b":", *part)
        values += raw.count(b",", *part)
    return nested, values
