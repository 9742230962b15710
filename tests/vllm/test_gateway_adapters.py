"""TRL's AsyncGRPO gives each version of its adapter a name, by its own client, through the gateway.

It unloads the old ones, and engines hold no more than it still wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bus._cli.options import Keys
from sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from sidecar._vllm.plugin import operations, worker_rpc
from tests.support.adapters import make_adapter
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint
from tests.vllm._vllm import MAX_POSITIONS, PROMPT, boot_environment, require_vllm, server_argv
from trainer_agent._gateway.server import serve

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.ci, pytest.mark.filterwarnings("default")]

LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
LIMIT_S = 600.0
VERSIONS, STALENESS, TOKENS = 5, 1, 16
OK, NOT_FOUND = 200, 404


async def held(connection: HttpConnection) -> set[str]:
    """The adapters for which the engine's worker has tensors."""
    asked = {"operation": operations.encode(operations.UndoAdapter(settled=False))}
    [done] = worker_rpc.read_done(await connection.ask(operations.PERFORM, asked))
    return set(done.adapters or ())


async def complete(http: aiohttp.ClientSession, url: str, model: str) -> tuple[int, list[int]]:
    """The status of a request for tokens, and the tokens."""
    sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    body: dict[str, Any] = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
    async with http.post(f"{url}/inference/v1/generate", json=body) as response:
        if response.status != OK:
            return response.status, []
        [choice] = (await response.json())["choices"]
        return OK, choice["token_ids"]


def test_engines_hold_only_the_adapters_that_trl_wants(tmp_path: Path) -> None:
    import accelerate  # type: ignore[import-untyped]  # noqa: PLC0415 - only with vLLM
    from trl.experimental.async_grpo.vllm_client import VLLMClient  # noqa: PLC0415

    accelerate.PartialState(cpu=True)  # TRL's log needs it
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)
    environment = {**os.environ, **boot_environment(tmp_path / "plugin")}
    made = {number: make_adapter(checkpoint.weights, number) for number in range(1, VERSIONS + 1)}
    folders = {number: each.save(tmp_path / f"v{number}") for number, each in made.items()}

    def train(url: str) -> None:
        """As `AsyncGRPOTrainer._sync_lora_weights` calls it."""
        client = VLLMClient(url, server_timeout=60.0)
        client.wait_for_server_ready()
        for version, folder in folders.items():
            client.pause()
            client.load_lora_adapter(f"lora-v{version}", str(folder))
            client.resume()
            stale = version - (STALENESS + 1)
            if stale > 0:
                client.unload_lora_adapter(f"lora-v{stale}")
        client.unload_lora_adapter("lora-v1")  # which it has not: no error for this client

    async def scenario() -> None:
        keys = Keys(None, None, insecure=False)
        async with contextlib.AsyncExitStack() as stack:
            _, broker = await stack.enter_async_context(a_broker())
            connections: list[HttpConnection] = []
            sidecars: list[Sidecar] = []
            for name in ("e0", "e1"):
                argv = server_argv(checkpoint.folder, *LORA)
                server = SupervisedServer(argv, env=environment)
                connections.append(HttpConnection(server=server))
                engine = VllmAdapter(connections[-1])
                sidecars.append(Sidecar(engine, broker=broker, group="policy", name=name))
            async with asyncio.TaskGroup() as booting:
                for sidecar in sidecars:
                    booting.create_task(stack.enter_async_context(sidecar))
            for sidecar in sidecars:
                await sidecar.joined()
            gateway = serve(broker, "policy", "127.0.0.1", 0, keys=keys, silence_s=60.0)
            url = await stack.enter_async_context(gateway)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            await asyncio.to_thread(train, url)
            wanted = {f"lora-v{VERSIONS - 1}", f"lora-v{VERSIONS}"}
            for connection in connections:
                assert await held(connection) == wanted
            ways = [url, *(sidecar.info.endpoint for sidecar in sidecars if sidecar.info)]
            assert len(ways) == 1 + len(sidecars)
            for way in ways:
                async with http.get(f"{way}/v1/models") as response:
                    cards = (await response.json())["data"]
                assert {card["id"] for card in cards if card["parent"]} == wanted
                assert (await complete(http, way, "lora-v3"))[0] == NOT_FOUND
                for number in (VERSIONS - 1, VERSIONS):
                    expected = checkpoint.greedy(made[number].merged, PROMPT, TOKENS)
                    assert await complete(http, way, f"lora-v{number}") == (OK, expected)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
