"""A prefill and a decode engine, served, with NIXL between them, while weights are updated: each
token is the one of its version, and nothing that is handed over stands in anybody's way."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.vllm.plugin.core.kv_versions import TAG
from tests.vllm._kv import (
    BOOT_S,
    GREEDY,
    HITS,
    PREFILL_AND_DECODE,
    TOKENS,
    Served,
    checkpoint_in,
    nixl,
    prompts,
    run,
)
from tests.vllm._vllm import require_vllm
from trainer_agent.rollouts.attempt import prefill
from trainer_agent.rollouts.client import RolloutClient

if TYPE_CHECKING:
    from collections.abc import Iterator

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
                patch.setattr("trainer_agent.rollouts.rollout.prefill", prefill_and_die)
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
        assert done.choices[0].attempts[0].ended_by == "died"
        await asyncio.to_thread(pair.check_rollout, done)

    run(main())
