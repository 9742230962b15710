"""Engines that don't go on by themselves, or whose sidecar was killed, are started anew."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_dp_restart import PROMPT, group
from tests.integration.test_killed import LEASE_MS, engines, generate
from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.procs import wavebus
from tests.support.rank_start import at_start
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.conftest import Bus


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4)


def serve_anew(bus: Bus, moe: Checkpoint, before: dict[str, int]) -> None:
    """All ranks are there in another life, and serve."""
    bus.broker.wait_event("dp_group_up", dp_group="moe")
    after = engines(bus)
    assert {name: after[name].pid for name in before} != before
    assert not set(before.values()) & {engine.pid for engine in after.values()}
    for engine in after.values():
        assert generate(engine.endpoint, 12) == moe.greedy(moe.weights, PROMPT, 12)


def load(endpoint: str) -> None:
    """A long request under way, that may break off."""

    def ask() -> None:
        with contextlib.suppress(OSError):  # its engine is ended
            generate(endpoint, 100_000)

    threading.Thread(target=ask, daemon=True).start()


@pytest.mark.slow
def test_ranks_that_deadlock_are_restarted(bus: Bus, moe: Checkpoint, tmp_path: Path) -> None:
    """They pause in one phase, as they must not: one waits in its step for one that is paused.
    The broker finds out which, has all of them ended, and they serve again."""
    env = at_start(tmp_path, "one_phase", "pause_in_one_phase", {})
    supervisor = group(bus, moe, env=env)
    before = {name: engine.pid for name, engine in engines(bus).items()}
    load(engines(bus)["moe-0"].endpoint)

    async def until_it_hangs() -> None:
        async with TrainerAgent(bus.address, lease_ms=LEASE_MS) as agent:
            await agent.wait_for_engines(2)
            while True:
                async with agent.paused(mode="keep"):
                    pass

    async def play() -> None:
        pausing = asyncio.create_task(until_it_hangs())
        asked = await asyncio.to_thread(bus.broker.wait_event, "restart_asked", dp_group="moe")
        assert asked["supervised"]
        assert sorted(asked["peers"]) == ["moe-0", "moe-1"]
        assert "has been in the" in asked["reason"]
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)

    asyncio.run(play())
    told = supervisor.wait_event("restart_asked")
    assert "has been in the" in told["reason"]
    supervisor.wait_event("dp_group_restarts")
    serve_anew(bus, moe, before)
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_restarted_with_its_mate(bus: Bus, moe: Checkpoint) -> None:
    """Its peer rank waits for it in a collective. It gets no SIGKILL from here."""
    supervisor = group(bus, moe)
    before = {name: engine.pid for name, engine in engines(bus).items()}
    load(engines(bus)["moe-0"].endpoint)
    os.kill(before["moe-1"], signal.SIGSTOP)
    bus.broker.wait_event("dp_group_down", dp_group="moe")
    asked = bus.broker.wait_event("restart_asked", dp_group="moe")
    assert asked["peers"] == ["moe-0"]
    assert "rank 1 (moe-1) has been gone" in asked["reason"]
    serve_anew(bus, moe, before)
    assert supervisor.stop() == 0


@pytest.mark.ci
def test_one_engine_is_restarted_with_its_sidecar(bus: Bus) -> None:
    """Under --restarts; by its name it is the same, and a pause in which it died goes on."""
    supervisor = bus.sidecar("e0", "--restarts", "2")
    bus.sidecar("e1")
    before = engines(bus)["e0"]
    assert before.pid != supervisor.pid

    async def play() -> None:
        async with TrainerAgent(bus.address, lease_ms=LEASE_MS) as agent:
            await agent.wait_for_engines(2)
            async with agent.paused():
                os.kill(before.pid, signal.SIGKILL)
                await asyncio.to_thread(bus.broker.wait_event, "peer_joined", peer="e0")

    asyncio.run(play())
    after = engines(bus)["e0"]
    assert after.pid != before.pid
    assert len(generate(after.endpoint)) == 8
    assert supervisor.stop() == 0


@pytest.mark.ci
def test_a_supervisor_gives_up_with_the_engines_exit_code(bus: Bus) -> None:
    supervisor = bus.sidecar("e0", "--restarts", "1")
    os.kill(engines(bus)["e0"].pid, signal.SIGKILL)
    bus.broker.wait_event("peer_joined", peer="e0")
    os.kill(engines(bus)["e0"].pid, signal.SIGKILL)
    assert supervisor.wait() == 4


def test_a_supervisor_that_is_killed_takes_its_engine_along(bus: Bus) -> None:
    """So nothing is left that nobody would start anew."""
    supervisor = bus.sidecar("e0", "--restarts", "1")
    supervisor.kill()
    left = bus.broker.wait_event("peer_left", peer="e0")
    assert left["peer"] == "e0"


def test_wrong_options_end_a_supervisor(bus: Bus) -> None:
    """They would be wrong the next time, too."""
    process = bus.add(
        wavebus("sidecar", "--broker", bus.address, "--restarts", "3", "--engine", "embedded")
    )
    assert process.wait() != 0
    assert "--model" in process.all_text()
