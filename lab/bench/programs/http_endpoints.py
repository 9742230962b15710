"""The program of HTTP endpoints: N FastAPI apps on N ports in one process.

They stand for engines. Each app has a ``uvicorn.Server`` as in a vLLM server, with httptools and,
unless turned off, a log line per request. The middleware of vLLM and uvicorn is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import uvicorn
from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse

from bus.messages import PauseMode  # noqa: TC001 - FastAPI reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEEP_ALIVE_S = 3600


def endpoint() -> FastAPI:
    """Returns an app with vLLM's routes ``/pause`` and ``/resume``, without an engine."""
    app = FastAPI(openapi_url=None)

    @app.post("/pause")
    async def pause(
        mode: Annotated[PauseMode, Query()] = "abort", clear_cache: Annotated[bool, Query()] = True
    ) -> JSONResponse:
        del mode, clear_cache  # parsed and checked, as vLLM does; there is nothing to pause
        return JSONResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> JSONResponse:
        return JSONResponse({"status": "resumed"})

    return app


async def http_endpoints(
    stack: contextlib.AsyncExitStack, engines: int, *, access_log: bool
) -> SimpleNamespace:
    """Serves many apps, each on a free port; the process's first answer has the ports."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(engines)]
    servers = [Quiet(_config(access_log=access_log)) for _ in listening]
    running = [
        asyncio.create_task(server.serve(sockets=[port]))
        for server, port in zip(servers, listening, strict=True)
    ]

    async def stop() -> None:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)

    stack.push_async_callback(stop)
    return SimpleNamespace(hello={"ports": [each.getsockname()[1] for each in listening]})


class Quiet(uvicorn.Server):
    """A server that leaves signals alone, because many run in one process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handling of signals by none."""
        yield


def _config(*, access_log: bool) -> uvicorn.Config:
    """Returns the default configuration, with logs on stderr: stdout is for answers."""
    log_config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    for handler in log_config["handlers"].values():
        handler["stream"] = "ext://sys.stderr"
    return uvicorn.Config(
        endpoint(),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=log_config,
        access_log=access_log,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
