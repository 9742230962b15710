"""LoRA adapters over the whole bus, to a supervised API server: clients ask for them by name."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bus.errors import Refused
from bus.messages import NackCode
from sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.core_state import parse_version
from sidecar._vllm.engine import VllmAdapter
from tests.contract.engine_suite import Watch
from tests.support.adapters import make_adapter
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.procs import Proc
from tests.vllm._vllm import (
    MAX_POSITIONS,
    PROMPT,
    REST_MS,
    boot_environment,
    require_vllm,
    server_argv,
)
from trainer_agent import TrainerAgent
from trainer_agent._update.update import Update

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

NAME, BASE = "policy-lora", "tiny"
LIMIT_S = 600.0
NOT_FOUND = 404
# On CPUs a request without an adapter, beside one with, gets what lies in the last slot.
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
# Runs a command with a tmpfs of its own, as on another host.
ELSEWHERE = (
    *("unshare", "--map-root-user", "--mount"),
    *("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"),
)


class Client:
    """Whoever asks the server for tokens."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/inference/v1/generate"

    async def generate(
        self, model: str, count: int, *, watch: Watch | None = None
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Greedy tokens, and which version each is of."""
        body = {
            "model": model,
            "token_ids": list(PROMPT),
            "sampling_params": {"temperature": 0.0, "max_tokens": count, "ignore_eos": True},
            "stream": True,
        }
        tokens: list[int] = []
        choice: dict[str, Any] = {}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._url, json=body, raise_for_status=True) as response,
        ):
            async for line in response.content:
                event = line.decode().strip().removeprefix("data: ")
                if not event or event == "[DONE]":
                    continue
                [choice] = json.loads(event)["choices"]
                tokens += choice["token_ids"]
                if watch is not None:
                    await watch.note(len(choice["token_ids"]))
        spans = [
            (parse_version(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"]
        ]
        return tokens, spans


def test_adapters_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One boot, one story: a first adapter that is given up, a first that stays, a second in the
    middle of requests, new weights below it, and a name that is the model's own."""
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)
    environment = {**os.environ, **boot_environment(tmp_path / "plugin", rest_ms=REST_MS)}
    first, second = (make_adapter(checkpoint.weights, seed) for seed in (1, 2))

    def reference(weights: Mapping[str, Tensor], count: int, *said: int) -> list[int]:
        prompt: Sequence[int] = (*PROMPT, *said)
        return checkpoint.greedy(weights, prompt, count)

    async def fails(*_: Any) -> None:
        raise RuntimeError("given up")

    async def scenario() -> None:
        argv = server_argv(checkpoint.folder, *LORA)
        server = SupervisedServer(argv, env=environment)
        client = Client(server.base_url)
        async with (
            a_broker() as (_, address),
            Sidecar(
                VllmAdapter(HttpConnection(server=server)), broker=address, name="e0"
            ) as sidecar,
            TrainerAgent(address, name="trainer") as agent,
        ):
            await sidecar.joined()
            await agent.wait_for_engines(1, timeout_s=LIMIT_S)
            with monkeypatch.context() as patch:
                patch.setattr(Update, "commit", fails)
                with pytest.raises(RuntimeError, match="given up"):
                    await agent.update_adapter(NAME, first.tensors, config=first.config)
            with pytest.raises(aiohttp.ClientResponseError) as unknown:
                await client.generate(NAME, 4)
            assert unknown.value.status == NOT_FOUND

            before = await agent.update_adapter(NAME, first.tensors, config=first.config)
            expected = reference(first.merged, 24)
            assert await client.generate(NAME, 24) == (expected, [(before, 0, 24)])
            assert (await client.generate(BASE, 24))[0] == reference(checkpoint.weights, 24)

            with monkeypatch.context() as patch:
                patch.setattr(Update, "commit", fails)
                with pytest.raises(RuntimeError, match="given up"):
                    await agent.update_adapter(NAME, second.tensors, config=second.config)
            assert await client.generate(NAME, 24) == (expected, [(before, 0, 24)])

            watch, count = Watch(), 300
            request = asyncio.create_task(client.generate(NAME, count, watch=watch))
            plain = asyncio.create_task(client.generate(BASE, count))
            await watch.reached(20)
            after = await agent.update_adapter(NAME, second.tensors, config=second.config)
            tokens, spans = await request
            assert [version for version, _, _ in spans] == [before, after]
            cut = spans[0][2]
            assert tokens[:cut] == reference(first.merged, cut)
            assert tokens[cut:] == reference(second.merged, count - cut, *tokens[:cut])
            assert (await plain)[0] == reference(checkpoint.weights, count)

            new = perturbed(checkpoint.weights, 3)
            latest = await agent.update_weights(new)
            merged = {
                name: weight + second.merged[name] - checkpoint.weights[name]
                for name, weight in new.items()
            }
            assert await client.generate(NAME, 24) == (reference(merged, 24), [(latest, 0, 24)])

            with pytest.raises(Refused, match="the name of the model") as refused:
                await agent.update_adapter(BASE, first.tensors, config=first.config)
            assert refused.value.code is NackCode.MALFORMED

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def _can_be_elsewhere() -> bool:
    return not subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode


@pytest.mark.skipif(not _can_be_elsewhere(), reason="no namespaces for this user")
def test_an_engine_of_another_host(tmp_path: Path) -> None:
    """It can't see the trainer's tmpfs. Over shared memory it is refused, with what would reach
    it, and goes on; over TCP it gets the adapter."""
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)
    made = make_adapter(checkpoint.weights, 1)
    expected = checkpoint.greedy(made.merged, PROMPT, 24)

    async def scenario() -> None:
        async with a_broker() as (_, address):
            command = (sys.executable, "-m", "bus._cli.main", "sidecar", "--broker", address)
            argv = server_argv(checkpoint.folder, *LORA)
            environment = boot_environment(tmp_path / "plugin")
            with Proc(*ELSEWHERE, *command, "--name", "e0", "--", *argv, env=environment):
                async with TrainerAgent(address, name="near") as agent:
                    await agent.wait_for_engines(1, timeout_s=LIMIT_S)
                    with pytest.raises(Refused, match="gloo and nccl reach engines") as refused:
                        await agent.update_adapter(NAME, made.tensors, config=made.config)
                    assert refused.value.code is NackCode.TRANSFER_FAILED
                    assert refused.value.nack.peer == "e0"
                async with TrainerAgent(address, name="far", backend="gloo") as agent:
                    [engine] = await agent.wait_for_engines(1)
                    version = await agent.update_adapter(NAME, made.tensors, config=made.config)
                    client = Client(engine.endpoint)
                    assert await client.generate(NAME, 24) == (expected, [(version, 0, 24)])

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
