"""What a trainer agent offers between updates: a version's age, and an end of its transport."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import ManifestRefused
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.serving import an_engine, assert_serve
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_versions_have_gaps_and_an_age_and_a_closed_transport_opens_again(
    tmp_path: Path, backend: str
) -> None:
    checkpoint = make_checkpoint(tmp_path, seed=3)
    first, second = (perturbed(checkpoint.weights, seed) for seed in (1, 2))

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", backend=backend) as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            old = await agent.update_weights(first)
            assert agent.commits_since(old) == 0
            with pytest.raises(ManifestRefused):
                await agent.update_weights({**second, "unknown.weight": torch.ones(2)})
            await agent.close_transport()
            new = await agent.update_weights(second)
            assert new > old + 1
            assert agent.commits_since(old) == 1
            assert agent.commits_since(0) == 2
            assert agent.commits_since(new) == 0
            await assert_serve(checkpoint, second, new, engine)

    asyncio.run(asyncio.wait_for(scenario(), 120))
