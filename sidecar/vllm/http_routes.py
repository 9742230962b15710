"""vLLM's own data routes for an ``AsyncLLM`` of this process, so that rollout clients reach it."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

from bus.errors import EngineError
from sidecar.supervision.server import DEV_MODE, complete_command

if TYPE_CHECKING:
    from collections.abc import Sequence


class HttpRoutes:
    """An API server in this event loop.

    Args:
        async_llm: whose requests it takes.
        options: vLLM's, such as ``--host``, ``--port`` and ``--api-key``; see
            :func:`sidecar.supervision.server.complete_command` for what is added.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(self, async_llm: Any, options: Sequence[str]) -> None:
        model = async_llm.vllm_config.model_config
        named = ("--model", model.model, "--served-model-name", model.served_model_name)
        self._llm = async_llm
        self._command = complete_command((*named, *options), {**os.environ, DEV_MODE: "1"})
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; return the URL at which it does.

        Raises:
            EngineError: it can't listen there.
        """
        import uvicorn  # noqa: PLC0415 - comes with vLLM
        from vllm.entrypoints.cli.serve import make_arg_parser  # noqa: PLC0415
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: PLC0415
        from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415
        from vllm.entrypoints.launchers.launcher import NoSignalServer  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(self._command.argv))
        tasks = await self._llm.get_supported_tasks()
        app = build_app(args, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, args, tasks)
        try:
            family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
            listening = socket.create_server((args.host, args.port), family=family)
        except OSError as error:
            raise EngineError(f"can't listen at {self._command.endpoint}: {error}") from error
        config = uvicorn.Config(
            app, lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=1
        )
        app.state.server = self._server = NoSignalServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        return self._command.endpoint

    async def close(self) -> None:
        """Answers that are under way have a second to end."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
