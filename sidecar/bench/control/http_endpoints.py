"""The engines' side over HTTP: N FastAPI apps on N ports in one process.

``python -m sidecar.bench.control.http_endpoints ENGINES LOOP ACCESS_LOG``; until stdin ends. Each
is a ``uvicorn.Server`` as a vLLM server has it: httptools, and with ACCESS_LOG 1 its line per
request, which is on unless the user turns it off. Without the middleware of vLLM and uvicorn's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import sys
from typing import TYPE_CHECKING, Annotated, cast

import uvicorn
from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse

from bus.messages import PauseMode  # noqa: TC001 - FastAPI reads the annotation
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.runtime.event_loop import LoopChoice

_KEEP_ALIVE_S = 3600


def endpoint() -> FastAPI:
    """What peers post to: vLLM's two routes, as it declares them, with no engine behind."""
    app = FastAPI(openapi_url=None)

    @app.post("/pause")
    async def pause(
        mode: Annotated[PauseMode, Query()] = "abort",
        clear_cache: Annotated[bool, Query()] = True,
    ) -> JSONResponse:
        del mode, clear_cache  # parsed and checked, as vLLM does; there is nothing to pause
        return JSONResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> JSONResponse:
        return JSONResponse({"status": "resumed"})

    return app


async def serve(engines: int, *, access_log: bool) -> None:
    """Serve all of them, each by a ``uvicorn.Server`` of its own, on a free port."""
    servers: list[uvicorn.Server] = []
    running: list[asyncio.Task[None]] = []
    ports: list[int] = []
    for _ in range(engines):
        listening = socket.create_server(("127.0.0.1", 0))
        ports.append(listening.getsockname()[1])
        server: uvicorn.Server = Quiet(_config(access_log=access_log))
        servers.append(server)
        running.append(asyncio.create_task(server.serve(sockets=[listening])))
    write_answer(ports=ports)
    async for _ in read_commands():
        pass
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*running)


class Quiet(uvicorn.Server):
    """One of many in a process: it leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(*, access_log: bool) -> uvicorn.Config:
    """uvicorn as it comes; its log goes to stderr, since stdout carries this process's words."""
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


if __name__ == "__main__":
    count, kind, log = sys.argv[1:]
    event_loop.run(serve(int(count), access_log=log == "1"), loop=cast("LoopChoice", kind))
