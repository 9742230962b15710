"""Drive a vLLM engine that lives in this process: an ``AsyncLLM``.

The caller builds the ``AsyncLLM`` with ``weight_transfer_config`` backend
``wavebus`` (or one of vLLM's own, such as ``nccl``) and keeps it: requests go to it
directly, and closing the adapter leaves it running.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import anyio

from bus.errors import EngineDead, EngineError, UsageError
from bus.lora import adapter_of
from bus.vllm_versions import require_supported, untested_reason
from sidecar.engine import (
    START_ANSWER_S,
    EngineInfo,
    PauseMode,
    ProbeResult,
    RankAssignment,
    answers_within,
)
from sidecar.supervision.server import DEV_MODE, complete_command
from sidecar.vllm.core_state import CoreLink, check_ranks, driven_backends, parse_version
from sidecar.vllm.lora_routes import adapter_id, adapter_path
from sidecar.vllm.plugin import worker_rpc
from sidecar.vllm.plugin.compat import check_backend
from sidecar.vllm.worker_client import AdapterBase, engine_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from sidecar.vllm.plugin.environment import DpCoordinator


__all__ = ["VllmEngine", "parse_version"]


DEATH_CHECK_S: Final = 0.5


class VllmEngine(AdapterBase):
    """An ``AsyncLLM`` as a :class:`sidecar.engine.Engine`.

    Args:
        async_llm: the engine, which stays the caller's.
        serve: options of vLLM's API server, such as ``("--port", "8000")``: its data routes are
            served from this process, and rollout clients reach them. None: they are not.
        dp_coordinator: ``bus`` insists that the bus coordinates its DP group; see
            :mod:`sidecar.vllm.plugin.environment` for how it comes to.
    """

    def __init__(
        self,
        async_llm: Any,
        *,
        serve: Sequence[str] | None = None,
        dp_coordinator: DpCoordinator = "vllm",
    ) -> None:
        self._llm = async_llm
        self._connection = InProcessConnection(async_llm)
        self._routes = HttpRoutes(async_llm, serve) if serve is not None else None
        super().__init__(CoreLink(dp_coordinator), self._connection, served=serve is not None)

    async def start(self) -> EngineInfo:
        """Check that this engine can be driven.

        Raises:
            EngineError: the vLLM is too old, or the engine was built without a backend that
                the bus drives, or with another coordinator; the text says what to change.
        """
        with answers_within(START_ANSWER_S, "the engine core of the AsyncLLM"):
            info = await self._read_info()
        return replace(info, endpoint=await self._routes.start()) if self._routes else info

    async def _read_info(self) -> EngineInfo:
        import vllm  # noqa: PLC0415 - whoever has an AsyncLLM has vLLM; nobody else needs it

        require_supported(vllm.__version__)
        config = self._llm.vllm_config
        transfer = config.weight_transfer_config
        backend = "" if transfer is None else str(transfer.backend)
        who = "the AsyncLLM (weight_transfer_config of AsyncEngineArgs)"
        check_backend(backend, who)
        # Asked before any call of the plugin's: without it, that would fail in all workers.
        worker_rpc.check_drives(await self._ask_workers(worker_rpc.ASK_PRESENCE), backend, who)
        parallel = config.parallel_config
        check_ranks(
            who,
            hybrid=parallel.data_parallel_hybrid_lb,
            elastic=bool(getattr(parallel, "enable_elastic_ep", False)),
        )
        # Behind an internal load balancer one client pauses all ranks: a DP group of one.
        external = bool(parallel.data_parallel_external_lb)
        cores = 1 if external else int(parallel.data_parallel_size)
        facts = worker_rpc.read(await self._ask_workers(worker_rpc.ASK_FACTS))
        await self._plugin.hello(facts, cores=cores)
        await self._admission.look()
        draft = worker_rpc.read_draft(await self._ask_workers(worker_rpc.ASK_DRAFT))
        info = EngineInfo(
            kind="vllm",
            software=f"vllm {vllm.__version__}",
            model=str(config.model_config.model),
            dp_rank=parallel.data_parallel_rank if external else 0,
            dp_size=parallel.data_parallel_size if external else 1,
            workers=parallel.world_size * (1 if external else parallel.data_parallel_size),
            backends=driven_backends(backend),
            endpoint="",
            can_sleep=bool(config.model_config.enable_sleep_mode),
            draft=draft,
            canary="abort" if self._admission.is_supported else "",
            closed=self._admission.found_closed,
            booted_closed=self._admission.booted_closed,
            features=facts.features,
            limits=facts.limits_of(cores),
            kv_connectors=self._plugin.caches.connectors,
            untested=untested_reason(vllm.__version__),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
        )
        self._core.learn(facts, info, cores=cores)
        return info

    def lora_request(self, adapter: str) -> Any:
        """vLLM's ``LoRARequest`` of an adapter that came over the bus, for
        ``AsyncLLM.generate(..., lora_request=...)``. Ask for it with every request: with another
        version of the adapter it is another one, which has no part in the others' prefix cache.

        Raises:
            UsageError: no update of it was committed here.
        """
        request = self._connection.settled.get(adapter)
        if request is None:
            have = ", ".join(sorted(self._connection.settled)) or "none"
            raise UsageError(f"adapter={adapter!r}: nobody has sent it yet (there are: {have})")
        return request

    async def close(self) -> None:
        """The engine is the caller's, and stays."""
        if self._routes is not None:
            await self._routes.close()
        self._plugin.close()

    async def died(self) -> str:
        while not self._llm.errored:  # vLLM offers a flag and no event
            self._core.check_coordinator()
            await anyio.sleep(DEATH_CHECK_S)
        return "vLLM's engine core is dead"

    async def in_flight(self) -> int:
        return len(self._llm.output_processor.request_states)

    async def request_ids(self) -> tuple[str, ...]:
        states = self._llm.output_processor.request_states.values()
        return tuple(dict.fromkeys(str(state.external_req_id)[:256] for state in states))

    async def version(self) -> int:
        return parse_version(await _call(self._llm.get_weight_version()))

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        clear = self._plugin.caches.clears(clear_cache)
        await _call(self._llm.pause_generation(mode=mode, clear_cache=clear))

    async def resume(self) -> None:
        await _call(self._llm.resume_generation())

    async def wake(self) -> None:
        """The workers wake. Then vLLM's own wake finds nothing asleep: it resumes, and, on 0.33,
        tells the KV connector where the cache lies now."""
        await self._ask_workers("wake_up", {"tags": None})
        await _call(self._llm.wake_up())

    async def abort_requests(self) -> int:
        processor = self._llm.output_processor
        requests = [*processor.request_states]
        if requests:
            everything = [*requests, *processor.parent_requests]
            await _call(self._llm.abort(everything, internal=True))
        return len(requests)

    async def clear_cache(self) -> None:
        if await self._plugin.caches.clear():
            return
        if not await _call(self._llm.reset_prefix_cache(reset_running_requests=True)):
            raise EngineError("vLLM could not drop its prefix cache: some of it is in use")
        await _call(self._llm.reset_mm_cache())
        await _call(self._llm.reset_encoder_cache())

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:
        prefetch_depth = await self._plugin.open_transfer(backend, params, place)
        self._connection.adapter_path = adapter_path(params) if adapter_of(backend) else ""
        return prefetch_depth

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        salt: str,
        *,
        mode: PauseMode,
        clear_cache: bool,
    ) -> tuple[ProbeResult, ...]:
        return await self._admission.probe(
            self, prompts, max_tokens, salt, mode=mode, clear_cache=clear_cache
        )

    async def probe_one(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> ProbeResult:
        result: ProbeResult = await _call(self._probe_one(request_id, prompt, max_tokens, salt))
        return result

    async def _probe_one(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> ProbeResult:
        from vllm import SamplingParams  # noqa: PLC0415 - see start()

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

    async def commit(self, version: int) -> None:
        await self._plugin.settle()
        await _call(self._llm.update_weight_version(str(version)))
        self._connection.settle()


class HttpRoutes:
    """An API server of vLLM's, in this event loop, for an ``AsyncLLM``. ``options``: vLLM's, which
    :func:`sidecar.supervision.server.complete_command` checks and completes."""

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


class InProcessConnection:
    """:class:`sidecar.vllm.worker_client.VllmConnection` of an ``AsyncLLM``."""

    def __init__(self, async_llm: Any) -> None:
        self.adapter_path = ""  # of the one that is under way
        self.loaded: dict[str, Any] = {}  # requests of adapters, since the last commit
        self.settled: dict[str, Any] = {}  # and of those that are committed
        self._llm = async_llm

    async def ask(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        return await _call(self._llm.collective_rpc(method, kwargs=kwargs or {}))

    async def load_adapter(self, name: str) -> None:
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - see start()

        arguments = (name, adapter_id(name), self.adapter_path)
        await _call(self._llm.add_lora(LoRARequest(*arguments, load_inplace=True)))
        self.loaded[name] = LoRARequest(*arguments)

    async def drop_adapter(self, name: str) -> None:
        self.loaded.pop(name, None)

    def settle(self) -> None:
        """What was loaded is committed."""
        self.settled.update(self.loaded)
        self.loaded.clear()


async def _call(call: Awaitable[Any]) -> Any:
    """Await a call of vLLM's, and name its failure.

    Raises:
        EngineDead: the engine core is gone.
        EngineError: what vLLM, or the plugin inside it, said.
    """
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - see start()

    try:
        return await call
    except EngineDeadError as error:
        raise EngineDead(f"vLLM: {error}") from error
    except Exception as error:
        raise engine_error(str(error) or type(error).__name__) from error
