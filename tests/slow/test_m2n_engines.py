"""Two engines of one layout under vLLM's ``nccl_m2n``: their workers are one mesh, of which vLLM
alone knows nothing. See :mod:`tests.vllm.test_m2n_engine`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support import pair_plugin
from tests.support.checkpoints import perturbed
from tests.vllm._two import Two, booted_two
from tests.vllm._vllm import require_vllm
from tests.vllm.test_m2n_engine import train, trainer_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("alike")
    with booted_two(folder, "nccl_m2n", pair_plugin.M2N, workers=1) as tested:
        pair_plugin.register_on_cpu("nccl_m2n")
        yield tested


def test_one_trainer_engine_updates_both(alike: Two) -> None:
    async def scenario() -> None:
        async with alike.on_the_bus() as agent:
            weights = dict(alike.weights)
            trainer = await asyncio.to_thread(trainer_of, agent, weights)
            for seed in (1, 2):
                weights.update(perturbed(alike.weights, seed))
                await asyncio.to_thread(trainer.send_weights)
                assert agent.last_update is not None
                assert (agent.last_update.engines, agent.last_update.excluded) == (2, ())
                await alike.assert_serve(weights)
            await asyncio.to_thread(trainer.shutdown)

    alike.run(scenario())


def test_two_ranks_send_a_half_each_to_both(alike: Two, tmp_path: Path) -> None:
    new = perturbed(alike.weights, 3)

    async def scenario() -> None:
        async with alike.joined("here", "served") as broker:
            leader, _ = await train(tmp_path, broker, [new], engines=2)
            assert leader[0]["version"] > 0
            await alike.assert_serve(new)

    alike.run(scenario())
