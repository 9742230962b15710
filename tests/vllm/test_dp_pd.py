"""Two ranks in lockstep that hand keys and values over, while weights are updated."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import certain_experts
from tests.vllm._kv import HITS, Served, nixl, prompts, run
from tests.vllm._vllm import MAX_POSITIONS, require_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

require_vllm()
pytest.importorskip("nixl", reason="the wheels nixl and nixl-cu12 are not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

LEASE_S = 24
LOAD_LIMIT_S = 900.0
RANKS = ("m-0", "m-1")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What the first one prefills, the second one decodes."""
    folder = tmp_path_factory.mktemp("ranks")
    with contextlib.ExitStack() as stack:
        made = certain_experts(folder / "model", max_positions=MAX_POSITIONS)
        options = [("--dp-group", "m", "--dp-size", "2", "--dp-coordinator", "vllm")]
        served = Served(stack, folder, made, RANKS, options, nixl(LEASE_S))
        served.wait()
        yield served


@pytest.mark.parametrize("clear_cache", [True, False], ids=["clear", "keep"])
@pytest.mark.parametrize("how", ["staged", "paused"])
def test_what_one_rank_holds_stands_in_no_ranks_way(
    ranks: Served, how: str, clear_cache: bool
) -> None:
    """Both commit. What is held is of the version before: where caches are cleared, it is not
    fetched; where they are kept, it is, and no later request finds it."""

    async def main() -> None:
        async with ranks.clients() as (agent, http):
            prompt = next(prompts(1 + clear_cache))
            params = await ranks.prefill(http, prompt)
            version = await ranks.update(agent, how=how, clear_cache=clear_cache)
            before = await ranks.metric(http, HITS)
            late = await ranks.decode(http, prompt, params)
            fetched = await ranks.metric(http, HITS) - before
            if clear_cache:
                assert ranks.check(prompt, late) == {version}
            assert bool(fetched) is not clear_cache
            before += fetched
            assert ranks.check(prompt, await ranks.answer(http, prompt)) == {version}
            assert await ranks.metric(http, HITS) > before or clear_cache

    run(main())


def test_each_token_is_of_its_version_under_load(
    ranks: Served, request: pytest.FixtureRequest
) -> None:
    """Five clients; no rank is excluded, and nobody turned away. Ranks in lockstep take each step
    together: two processors have hardly time for them."""

    async def main() -> None:
        async with ranks.clients() as (agent, http):
            before = await ranks.metric(http, HITS)
            found = await ranks.update_under_load(agent, http, 5, seed=10, how="staged")
            found["hits"] = int(await ranks.metric(http, HITS) - before)
            request.node.user_properties += found.items()  # in a report, `--junitxml`
            assert found["over_a_commit"]
            assert found["hits"]

    run(main(), LOAD_LIMIT_S)
