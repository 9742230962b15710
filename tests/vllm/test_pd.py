"""A prefill and a decode engine, served, with NIXL between them, while weights are updated: each
token is the one of its version, and nothing that is handed over stands in anybody's way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from sidecar.supervision.launch import free_port
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.processes import children, descendants, process_of_vllm, runs
from tests.support.procs import wavebus
from tests.vllm._vllm import MAX_POSITIONS, boot_environment, require_vllm, server_argv
from trainer_agent import TrainerAgent
from trainer_agent.rollouts.attempt import GENERATE, prefill
from trainer_agent.rollouts.client import RolloutClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from trainer_agent.rollouts.results import Completion

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
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}


class Pair:
    """A broker, the prefill engine ``p`` and the decode engine ``d``."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, connector: Mapping[str, Any]
    ) -> None:
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

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[TrainerAgent, aiohttp.ClientSession]]:
        """Who sends weights, and who asks: the engines are there, and it is known where."""
        async with TrainerAgent(self.address) as agent, aiohttp.ClientSession() as http:
            for view in await agent.wait_for_engines(2, timeout_s=BOOT_S):
                self.urls[view.name] = view.endpoint
            yield agent, http

    async def update(self, agent: TrainerAgent, **how: Any) -> int:
        new = perturbed(self.checkpoint.weights, seed=len(self.weights))
        version = await agent.update_weights(new, **how)
        assert agent.last_update is not None
        assert not agent.last_update.excluded
        self.weights[version] = new
        return version

    async def prefill(self, http: aiohttp.ClientSession, prompt: Sequence[int]) -> dict[str, Any]:
        """Have ``p`` compute the prompt; what it hands over."""
        params = await prefill(http, self.urls["p"], {"token_ids": [*prompt]})
        assert params["remote_block_ids"], params
        return params

    async def decode(
        self, http: aiohttp.ClientSession, prompt: Sequence[int], params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Have ``d`` go on with it; its choice."""
        body = {"token_ids": prompt, "sampling_params": GREEDY, "kv_transfer_params": params}
        async with http.post(self.urls["d"] + GENERATE, json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice

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

    def check_rollout(self, done: Completion) -> set[int]:
        """The same of a rollout's one choice."""
        [choice] = done.choices
        spans = [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in choice.spans
        ]
        found = {"token_ids": choice.token_ids, "weight_versions": spans}
        return self.check(done.prompt_token_ids, found)

    async def fetched(self, http: aiohttp.ClientSession) -> float:
        """How many tokens ``d`` has found on ``p``."""
        async with http.get(self.urls["d"] + "/metrics") as response:
            lines = (await response.text()).splitlines()
        name = "vllm:external_prefix_cache_hits_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def kill(self, name: str) -> None:
        """All processes of its vLLM; they are gone when this returns."""
        [guard] = children(self.sidecars[name].pid)
        [sidecar] = children(guard)
        server = process_of_vllm(sidecar, "server")
        pids = [server, *descendants(server)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while any(runs(pid) for pid in pids):
            pass

    @functools.cache  # noqa: B019 - a pair lives as long as its tests
    def _expected(self, version: int, before: tuple[int, ...], count: int) -> tuple[int, ...]:
        return tuple(self.checkpoint.greedy(self.weights[version], before, count))


def prompts(seed: int) -> Iterator[tuple[int, ...]]:
    """Prompts of three blocks of keys and values and a bit; half of them share the first two."""
    draw = random.Random(seed)
    shared = [draw.randrange(2, 60) for _ in range(64)]
    while True:
        own = [draw.randrange(2, 60) for _ in range(40)]
        yield tuple((shared if draw.random() < 0.5 else own[:32] * 2) + own)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(stack, tmp_path_factory.mktemp("pair"), NIXL)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


@pytest.mark.parametrize("how", ["staged", "paused"])
def test_what_is_held_for_a_decode_engine_stands_in_no_updates_way(pair: Pair, how: str) -> None:
    """Keys and values of the version before are not fetched; the prompt is computed anew."""

    async def main() -> None:
        async with pair.clients() as (agent, http):
            prompt = next(prompts(1))
            params = await pair.prefill(http, prompt)
            version = await pair.update(agent, how=how)
            assert pair.check(prompt, await pair.decode(http, prompt, params)) == {version}
            again = await pair.prefill(http, prompt)
            assert pair.check(prompt, await pair.decode(http, prompt, again)) == {version}

    run(main())


@pytest.mark.parametrize("how", ["staged", pytest.param("paused", marks=pytest.mark.slow)])
def test_kept_keys_and_values_are_found_by_no_later_request(pair: Pair, how: str) -> None:
    """What is fetched knowingly old is not found by who asks for the same at the new version."""

    async def main() -> None:
        async with pair.clients() as (agent, http):
            prompt = next(prompts(2))
            params = await pair.prefill(http, prompt)
            version = await pair.update(agent, how=how, clear_cache=False)
            await pair.decode(http, prompt, params)
            again = await pair.prefill(http, prompt)
            assert pair.check(prompt, await pair.decode(http, prompt, again)) == {version}

    run(main())


@pytest.mark.parametrize(
    ("how", "updates"),
    [
        ("staged", 3),
        pytest.param("paused", 3, marks=pytest.mark.slow),
        pytest.param("staged", 20, marks=pytest.mark.slow),
        pytest.param("paused", 20, marks=pytest.mark.slow),
    ],
)
def test_each_token_is_of_its_version_under_load(pair: Pair, how: str, updates: int) -> None:
    """Five clients; no engine is excluded, and nobody turned away."""

    async def main() -> None:
        async with pair.clients() as (agent, http):
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


def test_rollouts_are_prefilled_and_decoded_while_weights_are_updated(pair: Pair) -> None:
    """What is prefilled under the weights that decode is fetched; each token is of its version."""

    async def main() -> None:
        async with pair.clients() as (agent, http), RolloutClient(pair.address) as client:
            before, asked = await pair.fetched(http), prompts(50)
            answers = [await client.generate(next(asked), GREEDY) for _ in range(2)]
            assert await pair.fetched(http) > before
            both = await client.generate(answers[0].prompt_token_ids, GREEDY | {"n": 2})
            assert [c.token_ids for c in both.choices] == [answers[0].choices[0].token_ids] * 2
            many = client.generate_many([next(asked) for _ in range(10)], GREEDY, concurrency=5)
            answers.append((await anext(many))[1])
            await pair.update(agent)
            answers += [done async for _, done in many]
        for done in answers:
            await asyncio.to_thread(pair.check_rollout, done)
            assert {span.engine for span in done.choices[0].spans} == {"d"}

    run(main())


# Engines die here: these tests stay the last ones.
def test_a_prefill_engine_that_dies_before_its_prompt_is_fetched_costs_no_token(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine computes the prompt. The engine that died returns."""

    async def prefill_and_die(*args: Any) -> dict[str, Any]:
        params = await prefill(*args)
        await asyncio.to_thread(pair.kill, "p")
        return params

    async def main() -> None:
        async with pair.clients() as (agent, _), RolloutClient(pair.address) as client:
            with monkeypatch.context() as patch:
                patch.setattr("trainer_agent.rollouts.rollout.prefill", prefill_and_die)
                done = await client.generate(next(prompts(60)), GREEDY)
            ends = [(each.engine, each.ended_by) for each in done.choices[0].attempts]
            assert ends == [("d", "unfetched"), ("d", "length")]
            await asyncio.to_thread(pair.check_rollout, done)
            await asyncio.to_thread(pair.broker.wait_event, "peer_joined", BOOT_S, peer="p")
            await pair.update(agent)

    run(main())


def test_a_decode_engine_that_dies_while_it_decodes_costs_no_token(pair: Pair) -> None:
    """The prefill engine is the only one that is left."""
    seen: list[str] = []

    def kill_once(delta: Any) -> None:
        seen.append(delta.engine)
        if len(seen) == TOKENS // 4:
            pair.kill("d")

    async def main() -> None:
        async with RolloutClient(pair.address) as client:
            done = await client.generate(next(prompts(70)), GREEDY, on_delta=kill_once)
        assert {span.engine for span in done.choices[0].spans} == {"d", "p"}
        assert done.choices[0].attempts[0].ended_by == "died"
        await asyncio.to_thread(pair.check_rollout, done)

    run(main())
