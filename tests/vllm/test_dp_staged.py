"""Staged updates of real vLLM ranks in lockstep, with vLLM's own coordinator, that never stop.

As in :mod:`tests.integration.test_staged`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_staged import staged_updates
from tests.support.checkpoints import perturbed
from tests.vllm._dp import OrderFailed, boot_pair, shut_down
from tests.vllm._faults import make_world
from tests.vllm._vllm import Oracle, make_moe, require_vllm

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(
    ("clear_cache", "updates"), [(False, 8), pytest.param(True, 20, marks=pytest.mark.slow)]
)
def test_every_token_is_of_one_version(tmp_path: Path, clear_cache: bool, updates: int) -> None:
    """As of embedded engines."""

    async def scenario() -> None:
        async with make_world(tmp_path, "vllm_dp", coordinator="vllm") as world:
            world.clear_cache = clear_cache
            assert await staged_updates(world, updates) > 20 * updates

    asyncio.run(scenario())


def test_ranks_stage_an_open_update_part_by_part_and_swap_together(tmp_path: Path) -> None:
    """A request goes on meanwhile. What lacks a tensor, they refuse; the old weights serve on."""
    model, count = make_moe(tmp_path / "model", seed=1), 24
    oracle = Oracle(model)
    v_proj, k_proj = (f"model.layers.1.self_attn.{each}_proj.weight" for each in "vk")
    order = {"model": str(model), "first": ["model.layers.0.self_attn.k_proj.weight", v_proj]}

    async def scenario() -> None:
        pair = await boot_pair(tmp_path, model, "vllm")
        try:
            served = oracle.names()
            for seed, version, lost in ((31, 1, ""), (32, 2, k_proj), (33, 2, "")):
                name = await pair.begin(0, 400)
                await pair.until(0, name, 2)
                if lost:
                    for each in pair.ranks:
                        with pytest.raises(OrderFailed, match=f"{lost}: missing"):
                            await each.do("stage", seed=seed, lost=lost, **order)
                    await pair.both("unstage")
                else:
                    await pair.both("stage", seed=seed, **order)
                    served = perturbed(oracle.names(), seed)
                    await pair.both("swap", version=version)
                assert len(await pair.ranks[0].do("tokens", name=name)) == 400
                expected = oracle.greedy(served, count)
                for rank, each in enumerate(pair.ranks):
                    name = await pair.begin(rank, count)
                    assert await each.do("tokens", name=name) == expected
        finally:
            await shut_down(pair)

    asyncio.run(scenario())
