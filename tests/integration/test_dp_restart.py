"""A DP group whose rank dies is restarted as one, and joins again."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from bus._runtime.status_client import fetch_status
from tests.integration.test_killed import engines, generate
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.procs import run_wavebus, wavebus
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from tests.integration.conftest import Bus
    from tests.support.procs import Proc

PROMPT = [5, 9, 7]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4)


def group(bus: Bus, moe: Checkpoint, name: str = "moe", env: dict[str, str] | None = None) -> Proc:
    """Two supervised ranks, joined."""
    started = bus.add(
        wavebus(
            *("sidecar", "--broker", bus.address, "--dp-group", name, "--dp-size", "2"),
            *("--engine", "embedded", "--model", str(moe.folder)),
            env=env,
        )
    )
    for _ in range(2):
        bus.broker.wait_event("peer_joined", role="engine")
    return started


@pytest.mark.ci
def test_a_killed_rank_is_restarted_with_its_mate(bus: Bus, moe: Checkpoint) -> None:
    """The broker sees the DP group down, and up with new processes; then it serves, waits
    for nobody, and takes an update."""
    supervisor = group(bus, moe)
    before = engines(bus)
    os.kill(before["moe-1"].pid, signal.SIGKILL)
    down = bus.broker.wait_event("dp_group_down")
    assert down["dp_group"] == "moe"
    supervisor.wait_event("dp_group_restarts")
    bus.broker.wait_event("dp_group_up", dp_group="moe")
    after = engines(bus)
    assert len(after) == 2, bus.broker.all_text()
    assert {e.pid for e in after.values()}.isdisjoint(e.pid for e in before.values())
    new = perturbed(moe.weights, 5)

    async def update() -> None:
        async with TrainerAgent(bus.address) as trainer:
            await trainer.wait_for_engines(2)
            await trainer.update_weights(list(new.items()))

    asyncio.run(update())
    for name in ("moe-0", "moe-1"):
        assert generate(after[name].endpoint, 12) == moe.greedy(new, PROMPT, 12)
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_several_dp_groups_and_a_dense_engine_are_one_group(bus: Bus, moe: Checkpoint) -> None:
    """Two replicas of two ranks, and one engine that steps alone: paused and updated together;
    when one replica is down, the others go on, and it is named."""
    dense = bus.sidecar("dense", "--model", str(moe.folder))
    first, second = group(bus, moe, "first"), group(bus, moe, "second")
    new = perturbed(moe.weights, 5)

    async def play() -> None:
        async with TrainerAgent(bus.address) as trainer:
            await trainer.wait_for_engines(5)
            async with trainer.paused() as ack:
                assert ack.engines == 5
            first.signal(signal.SIGTERM)
            bus.broker.wait_event("dp_group_down", dp_group="first")
            version = await trainer.update_weights(list(new.items()))
            assert version == 1

    asyncio.run(play())
    assert first.wait() == 0
    for name in ("second-0", "second-1", "dense"):
        assert generate(engines(bus)[name].endpoint, 12) == moe.greedy(new, PROMPT, 12)
    (status,) = asyncio.run(fetch_status(bus.address, timeout_s=60)).groups
    states = {each.name: each.state for each in status.dp_groups}
    assert states["first"] == "down"
    assert states["second"] in ("idle", "running")
    shown = run_wavebus("status", "--broker", bus.address).stdout
    assert "first: rank" in shown
    assert second.stop() == 0
    assert dense.stop() == 0
