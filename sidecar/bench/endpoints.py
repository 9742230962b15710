"""The engines' side over HTTP: N FastAPI apps on N ports in one process.

``python -m sidecar.bench.endpoints ENGINES LOOP``; until stdin ends. Each is served
by uvicorn's own protocol over httptools, with every log off and nothing else in it.
One thing that N ``uvicorn.Server`` objects would do is left out, in favour of HTTP:
each would wake this process ten times per second.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, cast

import uvicorn
from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse
from uvicorn.server import ServerState

from bus.messages import PauseMode  # noqa: TC001 - FastAPI reads the annotation
from bus.runtime import loop
from bus.runtime.lines import answer, commands

if TYPE_CHECKING:
    from bus.runtime.loop import LoopChoice

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


async def listen() -> tuple[asyncio.Server, int]:
    """Serve one endpoint on a free port."""
    config = uvicorn.Config(
        endpoint(),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    config.load()
    state = ServerState()

    def protocol() -> asyncio.Protocol:
        made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=state, app_state={}
        )
        return made

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def serve(engines: int) -> None:
    """Serve all of them."""
    listening = [await listen() for _ in range(engines)]
    answer(ports=[port for _, port in listening])
    async for _ in commands():
        pass
    for server, _ in listening:
        server.close()


if __name__ == "__main__":
    count, kind = sys.argv[1:]
    loop.run(serve(int(count)), loop=cast("LoopChoice", kind))
