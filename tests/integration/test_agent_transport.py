"""What a trainer agent offers between updates: a version's age, and an end of its transport."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import ManifestRefused, UsageError
from sidecar._supervision.launch import free_port
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.serving import an_engine, assert_serve
from trainer_agent import SyncTrainerAgent, TrainerAgent

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


def test_engines_meet_the_sender_at_the_ports_that_the_trainer_chose(tmp_path: Path) -> None:
    """In each opening: of updates, after one that failed, and of a catch-up."""
    checkpoint = make_checkpoint(tmp_path, seed=3)
    first, second = (perturbed(checkpoint.weights, seed) for seed in (1, 2))
    ports = free_port(), free_port()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, backend="gloo", ports=ports, keep_last=True) as agent,
            an_engine(checkpoint, broker, "e0") as engine,
        ):

            def met_at() -> tuple[int, int]:
                init = agent._transport.sender._init  # type: ignore[attr-defined]
                return init.port, init.barrier_port

            await agent.wait_for_engines(1)
            old = await agent.update_weights(first)
            assert met_at() == ports
            with pytest.raises(ManifestRefused):
                await agent.update_weights({**second, "unknown.weight": torch.ones(2)})
            async with an_engine(checkpoint, broker, "e1") as late:
                await caught_up(agent, "e1", old)
                await assert_serve(checkpoint, first, old, late)
                new = await agent.update_weights(second)
                assert met_at() == ports
                await assert_serve(checkpoint, second, new, engine, late)

    asyncio.run(asyncio.wait_for(scenario(), 120))


async def caught_up(agent: TrainerAgent, name: str, version: int) -> None:
    while True:
        (group,) = (await agent.status()).groups
        engines = {each.name: (each.version, each.phase) for each in group.engines}
        if engines.get(name) == (version, "running"):
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("ports", [(7, 7), (0, 65_536), (-1, 0), (1, 2, 3), (1,)])
def test_ports_that_can_not_be_are_refused(ports: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=re.escape(f"ports={ports}")):
        TrainerAgent("tcp://127.0.0.1:1", backend="gloo", ports=ports)
    with pytest.raises(UsageError, match=re.escape(f"ports={ports}")):
        SyncTrainerAgent("tcp://127.0.0.1:1", backend="gloo", ports=ports).__enter__()
