"""A prefill and a decode engine, served, with NIXL between them, while weights are updated: each
token is the one of its version, and nothing that is handed over stands in anybody's way."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from sidecar.supervision.launch import free_port
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.procs import wavebus
from tests.vllm._vllm import MAX_POSITIONS, boot_environment, require_vllm, server_argv
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytest.importorskip("nixl", reason="the wheels nixl and nixl-cu12 are not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

BOOT_S = 300.0
LIMIT_S = 300.0
LEASE_S = 24
TOKENS = 40
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
}
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


class Pair:
    """A broker, the prefill engine ``p`` and the decode engine ``d``."""

    def __init__(self, stack: ExitStack, folder: Path, connector: Mapping[str, Any]) -> None:
        self.checkpoint: Checkpoint = make_checkpoint(
            folder / "model", seed=1, max_positions=MAX_POSITIONS
        )
        self.weights: dict[int, Mapping[str, Tensor]] = {0: self.checkpoint.weights}
        self.broker = stack.enter_context(wavebus("broker", "--listen", "tcp://127.0.0.1:*"))
        self.address = self.broker.first_line()
        argv = server_argv(
            self.checkpoint.folder,
            *("--disable-uvicorn-access-log", "--enable-prefix-caching"),
            *("--kv-transfer-config", json.dumps(connector)),
        )
        self.sidecars = {}
        for name, role in (("p", "prefill"), ("d", "decode")):
            environment = boot_environment(folder / name, rest_ms=10.0)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            options = ("--broker", self.address, "--name", name, "--role", role)
            self.sidecars[name] = stack.enter_context(
                wavebus("sidecar", *options, "--", *argv, env=environment)
            )
        self.urls: dict[str, str] = {}
        for _ in self.sidecars:
            self.broker.wait_event("peer_joined", timeout_s=BOOT_S, role="engine")

    async def routed(self, agent: TrainerAgent) -> None:
        """Learn where both are."""
        for view in await agent.wait_for_engines(2, timeout_s=BOOT_S):
            self.urls[view.name] = view.endpoint

    async def update(self, agent: TrainerAgent, **how: Any) -> int:
        new = perturbed(self.checkpoint.weights, seed=len(self.weights))
        version = await agent.update_weights(new, **how)
        assert agent.last_update is not None
        assert not agent.last_update.excluded
        self.weights[version] = new
        return version

    async def prefill(self, http: aiohttp.ClientSession, prompt: Sequence[int]) -> dict[str, Any]:
        """Have ``p`` compute the prompt; what it hands over."""
        answer = await self._ask(http, "p", prompt, 1, HAND_OVER)
        params: dict[str, Any] = answer["kv_transfer_params"]
        assert params["remote_block_ids"], params
        return params

    async def decode(
        self, http: aiohttp.ClientSession, prompt: Sequence[int], params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Have ``d`` go on with it; its choice."""
        answer = await self._ask(http, "d", prompt, TOKENS, params)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        name: str,
        prompt: Sequence[int],
        tokens: int,
        params: Mapping[str, Any],
    ) -> dict[str, Any]:
        body = {
            "token_ids": [*prompt],
            "sampling_params": {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True},
            "kv_transfer_params": params,
        }
        async with http.post(self.urls[name] + "/inference/v1/generate", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    def check(self, prompt: Sequence[int], choice: Mapping[str, Any]) -> set[int]:
        """Every token is that of the version it is labelled with; which these are."""
        tokens = tuple(choice["token_ids"])
        assert len(tokens) == TOKENS
        at, versions = 0, set()
        for span in choice["weight_versions"]:
            version = int(span["version"]) if span["version"].isdigit() else 0
            assert span["start"] == at, choice["weight_versions"]
            expected = self._expected(version, (*prompt, *tokens[:at]), span["end"] - at)
            assert tokens[at : span["end"]] == expected, choice["weight_versions"]
            at = span["end"]
            versions.add(version)
        assert at == TOKENS
        return versions

    @functools.cache  # noqa: B019 - a pair lives as long as its tests
    def _expected(self, version: int, before: tuple[int, ...], count: int) -> tuple[int, ...]:
        tokens: list[int] = []
        logits, past = self.checkpoint.forward(self.weights[version], before)
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            logits, past = self.checkpoint.forward(self.weights[version], tokens[-1:], past)
        return tuple(tokens)


def prompts(seed: int) -> Iterator[tuple[int, ...]]:
    """Prompts of three blocks of keys and values and a bit; half of them share the first two."""
    draw = random.Random(seed)
    shared = [draw.randrange(2, 60) for _ in range(64)]
    while True:
        own = [draw.randrange(2, 60) for _ in range(40)]
        yield tuple((shared if draw.random() < 0.5 else own[:32] * 2) + own)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, tmp_path_factory.mktemp("pair"), NIXL)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


@pytest.mark.parametrize("how", ["staged", "paused"])
def test_what_is_held_for_a_decode_engine_stands_in_no_updates_way(pair: Pair, how: str) -> None:
    """Keys and values of the version before are not fetched; the prompt is computed anew."""

    async def main() -> None:
        async with TrainerAgent(pair.address) as agent, aiohttp.ClientSession() as http:
            await pair.routed(agent)
            prompt = next(prompts(1))
            params = await pair.prefill(http, prompt)
            version = await pair.update(agent, how=how)
            assert pair.check(prompt, await pair.decode(http, prompt, params)) == {version}
            again = await pair.prefill(http, prompt)
            assert pair.check(prompt, await pair.decode(http, prompt, again)) == {version}

    run(main())


@pytest.mark.parametrize("how", ["staged", "paused"])
def test_kept_keys_and_values_are_found_by_no_later_request(pair: Pair, how: str) -> None:
    """What is fetched knowingly old is not found by who asks for the same at the new version."""

    async def main() -> None:
        async with TrainerAgent(pair.address) as agent, aiohttp.ClientSession() as http:
            await pair.routed(agent)
            prompt = next(prompts(2))
            params = await pair.prefill(http, prompt)
            version = await pair.update(agent, how=how, clear_cache=False)
            await pair.decode(http, prompt, params)
            again = await pair.prefill(http, prompt)
            assert pair.check(prompt, await pair.decode(http, prompt, again)) == {version}

    run(main())


@pytest.mark.parametrize("updates", [3, pytest.param(20, marks=pytest.mark.slow)], ids=["3", "20"])
@pytest.mark.parametrize("how", ["staged", "paused"])
def test_each_token_is_of_its_version_under_load(pair: Pair, how: str, updates: int) -> None:
    """Five clients; no engine is excluded, and nobody turned away."""

    async def main() -> None:
        async with TrainerAgent(pair.address) as agent, aiohttp.ClientSession() as http:
            await pair.routed(agent)
            ended: list[tuple[tuple[int, ...], dict[str, Any]]] = []
            done = asyncio.Event()

            async def client(seed: int) -> None:
                for prompt in prompts(seed):
                    if done.is_set():
                        return
                    params = await pair.prefill(http, prompt)
                    ended.append((prompt, await pair.decode(http, prompt, params)))

            clients = [asyncio.create_task(client(10 + each)) for each in range(5)]
            for _ in range(updates):
                before = len(ended)
                while len(ended) < before + 5:  # noqa: ASYNC110 - nothing tells it
                    await asyncio.sleep(0.05)
                await pair.update(agent, how=how)
            done.set()
            await asyncio.gather(*clients)
            for prompt, choice in ended:
                await asyncio.to_thread(pair.check, prompt, choice)

    run(main())
