"""Two engines of one model for tests: one in this process, with two workers, and one that is
served, with one. Both were booted with the same worker engine of vLLM's kind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
from typing import TYPE_CHECKING, Any

import aiohttp

from sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support.broker import a_broker
from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.vllm._vllm import (
    MAX_POSITIONS,
    PROMPT,
    Oracle,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    server_argv,
)
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

LIMIT_S = 600.0
TOKENS = 16


class Two:
    """An engine in this process, one that is served, and who asks them."""

    def __init__(
        self,
        llm: Any,
        server: SupervisedServer,
        backend: str,
        checkpoint: Checkpoint,
        runner: asyncio.Runner,
    ) -> None:
        self.llm = llm
        self.server = server
        self.backend = backend
        self.weights: Mapping[str, Tensor] = checkpoint.weights
        self.oracle = Oracle(checkpoint.folder)
        self._runner = runner
        self.broker = ""
        self._asked = 0

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(asyncio.wait_for(work, LIMIT_S))

    @contextlib.asynccontextmanager
    async def joined(self, *names: str) -> AsyncIterator[str]:
        """Those of these names (``here``, ``served``) at a broker."""
        async with contextlib.AsyncExitStack() as stack:
            _, broker = await stack.enter_async_context(a_broker())
            for name in names:
                engine = (
                    VllmEngine(self.llm)
                    if name == "here"
                    else VllmAdapter(HttpConnection(self.server.base_url))
                )
                sidecar = Sidecar(engine, broker=broker, group="policy", name=name)
                await stack.enter_async_context(sidecar)
                await sidecar.joined()
                assert sidecar.info is not None
                assert self.backend in sidecar.info.backends
            self.broker = broker
            yield broker

    @contextlib.asynccontextmanager
    async def on_the_bus(self, ranks: int = 1) -> AsyncIterator[SyncTrainerAgent]:
        """Both joined; and rank 0 of a trainer that waited for them."""
        async with self.joined("here", "served") as broker:
            agent = SyncTrainerAgent(broker, ranks=ranks, timeout_s=60.0)
            await asyncio.to_thread(agent.connect)
            try:
                await asyncio.to_thread(agent.wait_for_engines, 2)
                yield agent
            finally:
                await asyncio.to_thread(agent.close)

    async def assert_serve(self, weights: Mapping[str, Tensor]) -> None:
        """Both, greedily, the tokens of transformers with these weights: so none is paused."""
        expected = self.oracle.greedy(weights, TOKENS)
        assert await self.tokens_here() == expected
        assert await self.served_tokens() == expected
        self.weights = weights

    async def swap_ms(self) -> list[float]:
        """How long the last swap of each worker here has taken: those of no two are the same."""
        return [each["swap_ms"] for each in await self.llm.collective_rpc("wavebus_loading")]

    async def tokens_here(self) -> list[int]:
        """Of the one in this process."""
        self._asked += 1
        last = await generate(self.llm, f"r{self._asked}", TOKENS)
        return list(last.token_ids)

    async def served_tokens(self) -> list[int]:
        """Of the one that is served."""
        sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling}
        url = f"{self.server.base_url}/inference/v1/generate"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, raise_for_status=True) as response,
        ):
            [choice] = (await response.json())["choices"]
        return list(choice["token_ids"])


@contextlib.contextmanager
def booted_two(folder: Path, engine: str, *variables: str, workers: int = 2) -> Iterator[Two]:
    """Both, booted with vLLM's worker engine ``engine``, under some environment variables that are
    set to 1; ``workers``: of the one here."""
    checkpoint = make_checkpoint(folder / "model", seed=1, max_positions=MAX_POSITIONS)
    environment = {**boot_environment(folder), **dict.fromkeys(variables, "1")}
    transfer = {"backend": engine}
    argv = server_argv(checkpoint.folder, "--weight-transfer-config", json.dumps(transfer))
    server = SupervisedServer(argv, env={**os.environ, **environment})
    booted = async_llm(
        environment,
        engine_args(
            checkpoint.folder, weight_transfer_config=transfer, tensor_parallel_size=workers
        ),
    )
    served = HttpConnection(server=server)  # without a sidecar's adapter, which would claim it

    async def boot() -> Any:
        starting = asyncio.create_task(served.open())
        await asyncio.sleep(0)  # it boots while this process does
        llm = await booted.__aenter__()
        await starting
        return llm

    with asyncio.Runner() as runner:
        try:
            llm = runner.run(boot())
            tested = Two(llm, server, f"vllm:{engine}", checkpoint, runner)
            yield tested
        finally:
            runner.run(served.close())
            runner.run(booted.__aexit__(None, None, None))
            # While warnings are no errors yet: vLLM leaves its sockets to the collector.
            del tested.llm, llm
            gc.collect()
