"""A server which answers requests for tokens, and others, as a test has it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

from aiohttp import test_utils, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

# What vLLM 0.33 says in a `wait` or `abort` pause: with status 503, or as an event of a stream.
PAUSED: Final[dict[str, Any]] = {
    "error": {
        "message": "Generation is paused. Please retry after it resumes.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}


@contextlib.asynccontextmanager
async def generating(answer: Answer | Mapping[str, Answer]) -> AsyncIterator[str]:
    """Its URL. ``answer``: to requests for tokens, or by path."""
    app = web.Application()
    answers = {"/inference/v1/generate": answer} if callable(answer) else answer
    for path, each in answers.items():
        app.router.add_route("*", path, each)
    async with test_utils.TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def streamed(request: web.Request, *events: dict[str, Any]) -> web.StreamResponse:
    """An answer of server-sent events, each in a piece of its own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
