"""A server of one route, which answers requests for tokens as a test has it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from aiohttp import test_utils, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

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
async def generating(
    answer: Callable[[web.Request], Awaitable[web.Response]],
) -> AsyncIterator[str]:
    """Its URL."""
    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    async with test_utils.TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")
