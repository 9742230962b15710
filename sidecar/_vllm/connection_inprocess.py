"""Connects to a vLLM engine in the same process: an ``AsyncLLM``.

Requests go to the ``AsyncLLM`` directly, and closing the connection leaves it running. On demand
the connection serves vLLM's data routes from this process.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any, Final

import anyio

from bus.errors import EngineDead, EngineError
from bus.messages import ProbeResult
from sidecar._supervision.server import DEV_MODE, complete_command
from sidecar._vllm.lora_routes import adapter_id
from sidecar._vllm.plugin.operations import engine_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bus.messages import PauseMode

DEATH_CHECK_S: Final = 0.5


class InProcessConnection:
    """Makes vLLM's calls on an ``AsyncLLM``, for :class:`sidecar._vllm.engine.VllmAdapter`.

    Calls raise :class:`EngineError`, or :class:`EngineDead` if the engine core is gone.

    Args:
        async_llm: the engine; the caller keeps ownership.
        serve: options of vLLM's API server; None: no routes are served.

    Attributes:
        loaded: by name of a LoRA adapter, vLLM's ``LoRARequest`` for it; only of adapters that were
            loaded since the last commit.
        settled: the same for adapters whose update is committed, which clients may use.
    """

    kind = "vllm"
    name = "the AsyncLLM (weight_transfer_config of AsyncEngineArgs)"
    is_shared = False
    is_local = True
    ends_with_sidecar = False

    def __init__(self, async_llm: Any, serve: Sequence[str] | None = None) -> None:
        self.is_served = serve is not None
        self.loaded: dict[str, Any] = {}
        self.settled: dict[str, Any] = {}
        self._removed: dict[str, Any] = {}  # by the update under way
        self._llm = async_llm
        self._routes = HttpRoutes(async_llm, serve) if serve is not None else None

    async def open(self) -> None:
        """Does nothing: the caller has started the ``AsyncLLM``."""

    async def close(self) -> None:
        """Stops serving routes; the ``AsyncLLM`` stays, because the caller owns it."""
        if self._routes is not None:
            await self._routes.close()

    async def died(self, on_look: Callable[[], None]) -> str:
        """Waits until the engine core is dead; ``on_look`` is called before each check."""
        while not self._llm.errored:  # vLLM has a flag for this, but no event
            on_look()
            await anyio.sleep(DEATH_CHECK_S)
        return "vLLM's engine core is dead"

    async def software_version(self) -> str:
        import vllm  # noqa: PLC0415 - only a process with an AsyncLLM has vLLM

        return str(vllm.__version__)

    async def config(self) -> dict[str, Any]:
        """Returns the parts of vLLM's configuration (``VllmConfig``) that the adapter needs."""
        config = self._llm.vllm_config
        transfer = config.weight_transfer_config
        return {
            "weight_transfer_config": transfer and vars(transfer),
            "parallel_config": vars(config.parallel_config),
            "model_config": vars(config.model_config),
        }

    async def accepts_probes(self) -> bool:
        """Returns True: an ``AsyncLLM`` always takes token ids as a prompt."""
        return True

    async def endpoint(self) -> str:
        """Begins to serve routes if ``serve`` was given, and returns their URL; else empty."""
        return await self._routes.start() if self._routes is not None else ""

    async def in_flight(self, seen: int | None) -> int:  # noqa: ARG002 - this count is exact
        """Returns how many requests the ``AsyncLLM`` has."""
        return len(self._llm.output_processor.request_states)

    async def request_ids(self) -> tuple[str, ...]:
        """Returns the ids of all requests, as clients chose them."""
        states = self._llm.output_processor.request_states.values()
        return tuple(dict.fromkeys(str(state.external_req_id)[:256] for state in states))

    async def weight_version(self) -> str:
        """Returns the text in which vLLM stores the version of its weights."""
        return str(await _call(self._llm.get_weight_version()))

    async def set_weight_version(self, version: str) -> None:
        """Sets the text in which vLLM stores the version of its weights.

        This is part of every commit, so loaded LoRA adapters count as committed from then on.
        """
        await _call(self._llm.update_weight_version(version))
        self.settled.update(self.loaded)
        self.loaded.clear()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pauses the engine by ``AsyncLLM.pause_generation``; returns when the engine is idle."""
        await _call(self._llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """Resumes the engine by ``AsyncLLM.resume_generation``."""
        await _call(self._llm.resume_generation())

    async def wake_up(self) -> None:
        """Allocates freed memory and resumes the engine, by ``AsyncLLM.wake_up``."""
        await _call(self._llm.wake_up())

    async def abort_requests(self) -> int:
        """Ends all requests with the tokens they have; returns how many there were."""
        processor = self._llm.output_processor
        requests = [*processor.request_states]
        if requests:
            everything = [*requests, *processor.parent_requests]
            await _call(self._llm.abort(everything, internal=True))
        return len(requests)

    async def reset_caches(self) -> bool:
        """Drops all caches by vLLM's own methods; see :meth:`HttpConnection.reset_caches`."""
        if not await _call(self._llm.reset_prefix_cache(reset_running_requests=True)):
            return False
        await _call(self._llm.reset_mm_cache())
        await _call(self._llm.reset_encoder_cache())
        return True

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> ProbeResult:
        """Runs one probe of a canary; see :meth:`HttpConnection.generate`."""
        result: ProbeResult = await _call(self._generate(request_id, prompt, max_tokens, salt))
        return result

    async def _generate(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> ProbeResult:
        from vllm import SamplingParams  # noqa: PLC0415 - see software_version()

        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        asked = {"prompt_token_ids": list(prompt), "cache_salt": salt}
        last = None
        async for output in self._llm.generate(asked, params, request_id=request_id):
            last = output.outputs[0]
        assert last is not None
        tokens = tuple(last.token_ids)
        steps = zip(last.logprobs, tokens, strict=True)
        return ProbeResult(tokens, tuple(float(step[token].logprob) for step, token in steps))

    async def ask(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        """Calls a method of the workers or the core; see :meth:`HttpConnection.ask`."""
        return await _call(self._llm.collective_rpc(method, kwargs=kwargs or {}))

    async def check_adapter(self, name: str) -> None:  # noqa: ARG002 - as HttpConnection's
        """Begins another update of an adapter: an ``AsyncLLM`` takes any name."""
        self._removed.clear()

    async def load_adapter(self, name: str, path: str) -> None:
        """Makes vLLM load the LoRA adapter of this name again, by ``AsyncLLM.add_lora``."""
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - see software_version()

        arguments = (name, adapter_id(name), path)
        await _call(self._llm.add_lora(LoRARequest(*arguments, load_inplace=True)))
        self.loaded[name] = LoRARequest(*arguments)

    async def undo_adapter(self, name: str) -> None:
        """Forgets the loaded LoRA adapter, or restores the removed one, as the workers have."""
        self.loaded.pop(name, None)
        if name in self._removed:
            self.settled[name] = self._removed.pop(name)

    async def remove_adapter(self, name: str) -> None:
        """Forgets the LoRA adapter, so that no new request gets it."""
        if name in self.settled:
            self._removed[name] = self.settled.pop(name)


class HttpRoutes:
    """Serves vLLM's data routes for an ``AsyncLLM``, in this event loop.

    Args:
        async_llm: the engine.
        options: options of vLLM's API server. Missing ones are added, as for a supervised server
            (:func:`sidecar._supervision.server.complete_command`).
    """

    def __init__(self, async_llm: Any, options: Sequence[str]) -> None:
        model = async_llm.vllm_config.model_config
        named = ("--model", model.model, "--served-model-name", model.served_model_name)
        self._llm = async_llm
        self._command = complete_command((*named, *options), {**os.environ, DEV_MODE: "1"})
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Begins to listen; returns the URL for clients.

        Raises:
            EngineError: the address can't be used.
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
        """Stops listening; running answers have 1 s to end."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task


async def _call(call: Awaitable[Any]) -> Any:
    """Awaits a vLLM call, and translates its exceptions.

    Raises:
        EngineDead: the engine core is gone.
        EngineError: with the text of vLLM, or of the plugin inside it.
    """
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - see software_version()

    try:
        return await call
    except EngineDeadError as error:
        raise EngineDead(f"vLLM: {error}") from error
    except Exception as error:
        raise engine_error(str(error) or type(error).__name__) from error
