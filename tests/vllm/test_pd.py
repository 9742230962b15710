"""A prefill and a decode engine, served, with NIXL between them, while weights are updated: each
token is the one of its version, and nothing that is handed over stands in anybody's way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from sidecar._vllm.plugin.core.kv_versions import TAG
from tests.vllm._kv import (
    BOOT_S,
    GREEDY,
    HITS,
    OWN_HITS,
    PREFILL_AND_DECODE,
    TOKENS,
    Served,
    checkpoint_in,
    nixl,
    prompts,
    run,
)
from tests.vllm._vllm import require_vllm
from trainer_agent._rollouts.attempt import prefill
from trainer_agent._rollouts.client import RolloutClient
from trainer_agent._weights.source import PairSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

require_vllm()
pytest.importorskip("nixl", reason="the wheels nixl and nixl-cu12 are not installed here")
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LEASE_S = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A broker, the prefill engine ``p`` and the decode engine ``d``."""
    folder = tmp_path_factory.mktemp("pair")
    with contextlib.ExitStack() as stack:
        made = checkpoint_in(folder)
        served = Served(stack, folder, made, "pd", PREFILL_AND_DECODE, nixl(LEASE_S))
        served.wait()
        yield served


@pytest.mark.parametrize("how", ["staged", "paused"])
def test_what_is_held_for_a_decode_engine_stands_in_no_updates_way(pair: Served, how: str) -> None:
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
def test_kept_keys_and_values_are_found_by_no_later_request(pair: Served, how: str) -> None:
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


@pytest.mark.parametrize("how", ["staged", pytest.param("paused", marks=pytest.mark.slow)])
def test_kept_keys_and_values_that_name_no_version_are_found_by_no_later_request(
    pair: Served, how: str
) -> None:
    """A router has dropped their salt: later requests get the new version's, with and without."""

    async def main() -> None:
        async with pair.clients() as (agent, http):
            prompt = next(prompts(3))
            params = await pair.prefill(http, prompt)
            del params[TAG]
            version = await pair.update(agent, how=how, clear_cache=False)
            await pair.decode(http, prompt, params)
            for loses_salt in (False, True, False):
                found = await pair.answer(http, prompt, loses_salt=loses_salt)
                assert pair.check(prompt, found) == {version}
            before = await pair.metric(http, OWN_HITS)
            assert pair.check(prompt, await pair.decode(http, prompt)) == {version}
            assert await pair.metric(http, OWN_HITS) > before

    run(main())


def test_keys_and_values_that_name_no_version_are_counted_and_not_fetched(pair: Served) -> None:
    """As from a prefill engine that is not on the bus."""

    async def main() -> None:
        async with pair.clients() as (agent, http):
            await pair.update(agent)  # which clears caches: the last one may have kept them
            before = {view.name: view.untagged for view in await agent.wait_for_engines(2)}
            prompt = next(prompts(4))
            params = await pair.prefill(http, prompt)
            del params[TAG]
            fetched = await pair.metric(http, HITS)
            pair.check(prompt, await pair.decode(http, prompt, params))
            assert await pair.metric(http, HITS) == fetched
            while True:
                seen = {view.name: view.untagged for view in await agent.wait_for_engines(2)}
                if seen != before:
                    break
            assert seen == {**before, "d": before["d"] + 1}

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
def test_each_token_is_of_its_version_under_load(pair: Served, how: str, updates: int) -> None:
    """Five clients; no engine is excluded, and nobody turned away."""

    async def main() -> None:
        async with pair.clients() as (agent, http):
            found = await pair.update_under_load(agent, http, updates, seed=10, how=how)
            assert found["over_a_commit"]

    run(main())


@pytest.mark.parametrize(
    ("how", "updates"),
    [
        ("staged", 3),
        pytest.param("paused", 3, marks=pytest.mark.slow),
        pytest.param("staged", 20, marks=pytest.mark.slow),
    ],
)
def test_salts_that_are_lost_under_load_cost_no_token(pair: Served, how: str, updates: int) -> None:
    """Of two in five hand-overs, with caches kept: no request between two commits has a token of
    other weights than those that it is labelled with."""

    async def main() -> None:
        async with pair.clients() as (agent, http):
            found = await pair.update_under_load(
                agent, http, updates, seed=30, how=how, clear_cache=False, lost_salts=0.4
            )
            assert found["lost_salts"]
            assert found["tokens"]

    run(main())


class UntilIdleConnectionsAreClosed(PairSource):
    """Its last tensors come when both engines have closed connections on which nothing came since
    the first ones, as vLLM's server does after 5 s."""

    def __init__(self, weights: Mapping[str, Tensor], urls: Iterable[str]) -> None:
        super().__init__(weights)
        self._urls = tuple(urls)
        self.closed = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        *others, last = super().__iter__()
        yield from others
        with contextlib.ExitStack() as stack:
            for connection in [stack.enter_context(asked(url)) for url in self._urls]:
                while connection.recv(1 << 16):
                    pass
                self.closed += 1
        yield last


def asked(url: str) -> socket.socket:
    """A connection that stays open after its answer."""
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    connection = socket.create_connection((parts.hostname, parts.port), timeout=BOOT_S)
    connection.sendall(f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    return connection


def test_a_chunk_that_takes_longer_than_connections_are_kept_costs_no_engine(pair: Served) -> None:
    """A paused update, whose next calls find that vLLM has closed what was idle."""

    async def main() -> None:
        async with pair.clients(chunk_bytes=1 << 14) as (agent, http):
            made: list[UntilIdleConnectionsAreClosed] = []

            def source(weights: Mapping[str, Tensor]) -> UntilIdleConnectionsAreClosed:
                made.append(UntilIdleConnectionsAreClosed(weights, pair.urls.values()))
                return made[0]

            version = await pair.update(agent, how="paused", source=source)
            assert made[0].closed == len(pair.urls) == 2
            prompt = next(prompts(5))
            assert pair.check(prompt, await pair.answer(http, prompt)) == {version}
            assert agent.last_update is not None
            assert agent.last_update.chunks > 2

    run(main())


def test_rollouts_are_prefilled_and_decoded_while_weights_are_updated(pair: Served) -> None:
    """What is prefilled under the weights that decode is fetched; each token is of its version."""

    async def main() -> None:
        async with pair.clients() as (agent, http), RolloutClient(pair.address) as client:
            before, asked = await pair.metric(http, HITS), prompts(50)
            answers = [await client.generate(next(asked), GREEDY) for _ in range(2)]
            assert await pair.metric(http, HITS) > before
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
    pair: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine computes the prompt. The engine that died returns."""

    async def prefill_and_die(*args: Any) -> dict[str, Any]:
        params = await prefill(*args)
        await asyncio.to_thread(pair.kill, "p")
        return params

    async def main() -> None:
        async with pair.clients() as (agent, _), RolloutClient(pair.address) as client:
            with monkeypatch.context() as patch:
                patch.setattr("trainer_agent._rollouts.rollout.prefill", prefill_and_die)
                done = await client.generate(next(prompts(60)), GREEDY)
            ends = [(each.engine, each.ended_by) for each in done.choices[0].attempts]
            assert ends == [("d", "unfetched"), ("d", "length")]
            await asyncio.to_thread(pair.check_rollout, done)
            await asyncio.to_thread(pair.broker.wait_event, "peer_joined", BOOT_S, peer="p")
            await pair.update(agent)

    run(main())


def test_a_decode_engine_that_dies_while_it_decodes_costs_no_token(pair: Served) -> None:
    """The prefill engine is the only one that is left."""
    seen: list[str] = []

    def kill_once(delta: Any) -> None:
        seen.append(delta.engine)
        if len(seen) == TOKENS // 4:
            pair.kill("d")

    async def main() -> None:
        async with RolloutClient(pair.address) as client:
            asked = GREEDY | {"max_tokens": 10 * TOKENS}  # still runs when d is killed
            done = await client.generate(next(prompts(70)), asked, on_delta=kill_once)
        assert {span.engine for span in done.choices[0].spans} == {"d", "p"}
        # The prefill engine is another one since it died: the first transfer from it may fail.
        ends = [each.ended_by for each in done.choices[0].attempts]
        assert ends[ends[0] == "unfetched"] == "died"
        await asyncio.to_thread(pair.check_rollout, done)

    run(main())
