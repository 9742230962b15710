"""Serves requests of an embedded engine over HTTP, by the routes of a vLLM server.

==================================  ==========================================
``POST /inference/v1/generate``     tokens in, tokens out; see ``http_messages.py``
``GET /health``                     200 while the engine lives, else 503; connections
``GET /v1/models``                  the served model
``GET /load``                       number of requests, as ``server_load``
==================================  ==========================================
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from aiohttp import web

from bus._runtime.http_access import HttpAccess
from bus._runtime.http_server import HttpServer
from bus.errors import EngineError
from bus.rejection import is_closed_message
from sidecar._embedded.http_messages import (
    BadRequest,
    check_request,
    decode_request,
    encode_chunk,
    encode_response,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar._embedded.requests import Delta, Generation
    from sidecar._embedded.sampling import SamplingParams

MAX_BODY_BYTES: Final = 16 * 1024 * 1024
_GUARDED: Final = ("/v1", "/inference")  # as vLLM's API key does


class ServedEngine(Protocol):
    """The part of an engine that :class:`DataPlane` uses.

    Attributes:
        vocab_size: how many tokens the vocabulary has.
        max_model_len: how many tokens a sequence may have, prompt and output together.
        model_name: the name of the served model.
    """

    vocab_size: int
    max_model_len: int
    model_name: str

    @property
    def is_alive(self) -> bool:
        """Whether the engine has started, and neither closed nor crashed."""

    async def in_flight(self) -> int:
        """Returns how many requests have not ended."""

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, stream: bool
    ) -> Generation:
        """Begins a request, and returns an iterator over its output."""


class DataPlane:
    """The HTTP server of one embedded engine, in the engine's event loop.

    Args:
        port: port to listen on; 0 takes any free one.
        api_key: the key that clients must send; empty: clients need none.
    """

    def __init__(self, engine: ServedEngine, host: str, port: int, api_key: str = "") -> None:
        self._engine = engine
        self._host = host
        self._port = port
        routes = [
            web.post("/inference/v1/generate", self._generate),
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.get("/load", self._load),
        ]
        self._server = HttpServer(
            routes,
            _answer_error,
            _answer_exception,
            max_body_bytes=MAX_BODY_BYTES,
            access=HttpAccess(api_key, is_open=lambda path: not path.startswith(_GUARDED)),
        )

    async def start(self) -> str:
        """Begins to listen, and returns the base URL."""
        return await self._server.start(self._host, self._port)

    async def close(self) -> None:
        """Stops listening; running answers have 1 s to end."""
        await self._server.close()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = decode_request(await http.read())
        engine = self._engine
        check_request(
            body,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            model=engine.model_name,
        )
        request_id = body.request_id or secrets.token_hex(16)
        generation = engine.generate(body.token_ids, body.sampling_params, stream=bool(body.stream))
        try:
            if body.stream:
                return await _stream(http, generation, request_id)
            outputs = _admitted(await generation.outputs())
        finally:
            generation.abort()
        answer = encode_response(
            outputs,
            request_id=request_id,
            model=engine.model_name,
            prompt_len=len(body.token_ids),
        )
        return web.Response(body=answer, content_type="application/json")

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(self._server.load, status=200 if self._engine.is_alive else 503)

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._engine.model_name,
            "object": "model",
            "owned_by": "wavebus",
            "root": self._engine.model_name,
            "max_model_len": self._engine.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": await self._engine.in_flight()})


async def _stream(http: web.Request, generation: Generation, request_id: str) -> web.StreamResponse:
    """Sends one server-sent event per delta; ready deltas share one write."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(http)
    try:
        while deltas := _admitted(await generation.ready()):
            await response.write(
                b"".join(encode_chunk(delta, request_id=request_id) for delta in deltas)
            )
    except EngineError as error:
        # The status line was sent long ago: the error is an event of its own, as in vLLM.
        await response.write(b"data: " + _error_body(500, str(error)) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _admitted(deltas: list[Delta]) -> list[Delta]:
    """Returns the deltas, unless the request was rejected.

    Raises:
        EngineError: admission is closed.
    """
    for delta in deltas:
        if is_closed_message(delta.stop_reason):
            raise EngineError(str(delta.stop_reason))
    return deltas


def _answer_error(_: web.Request, status: int, text: str) -> web.Response:
    return _error(status, "Unauthorized" if status == 401 else text)  # noqa: PLR2004 - as vLLM


def _answer_exception(_: web.Request, error: Exception) -> web.Response | None:
    if isinstance(error, BadRequest):
        return _error(400, str(error), error.field)
    return _error(503, str(error)) if isinstance(error, EngineError) else None


def _error(status: int, message: str, param: str = "") -> web.Response:
    body = _error_body(status, message, param)
    return web.Response(status=status, body=body, content_type="application/json")


def _error_body(status: int, message: str, param: str = "") -> bytes:
    """Returns an error as vLLM encodes it."""
    kind = "BadRequestError" if 400 <= status < 500 else "InternalServerError"  # noqa: PLR2004
    if is_closed_message(message):
        kind, status = "ServiceUnavailableError", 503
    error = {"message": message, "type": kind, "param": param or None, "code": status}
    return msgspec.json.encode({"error": error})
