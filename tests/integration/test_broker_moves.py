"""A broker that is started again elsewhere has all its peers back, and updates go on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from bus._runtime.zmq_transport import ZmqServer
from bus.errors import WavebusError
from tests.support.checkpoints import perturbed
from tests.support.procs import run_wavebus
from trainer_agent import RolloutClient, TrainerAgent

if TYPE_CHECKING:
    from torch import Tensor

    from tests.integration.conftest import Bus

PATIENCE_S = 120.0
LEASE_MS = 20_000
PROMPT = [5, 9, 7]
TOKENS = 200


def free_address() -> str:
    async def bind() -> str:
        with contextlib.closing(ZmqServer("tcp://127.0.0.1:*")) as server:
            return server.address

    return asyncio.run(bind())


@pytest.mark.parametrize("of_trainer", ["a list", "a lookup"])
def test_peers_follow_the_broker_and_updates_go_on(bus: Bus, of_trainer: str) -> None:
    """It dies in the middle of an update, which ends in a version or an error; requests go on."""
    there = free_address()
    places = [bus.address, there]
    bus.address = ",".join(places)
    for name in ("e0", "e1"):
        bus.sidecar(name)
    weights = load_file(bus.checkpoint.folder / "model.safetensors")

    async def update(agent: TrainerAgent, number: int) -> int | None:
        new: dict[str, Tensor] = perturbed(weights, number)
        with contextlib.suppress(WavebusError):
            return await agent.update_weights(new, how="paused")
        return None

    async def main() -> None:
        broker = bus.address if of_trainer == "a list" else lambda: places[0]
        async with (
            TrainerAgent(broker, name="trainer", lease_ms=LEASE_MS, chunk_bytes=20_000) as agent,
            RolloutClient(bus.address) as rollouts,
        ):
            await agent.wait_for_engines(2)
            assert await update(agent, 1) == 1
            asked = asyncio.create_task(
                rollouts.generate(PROMPT, {"max_tokens": TOKENS, "ignore_eos": True})
            )
            updating = asyncio.create_task(update(agent, 2))
            await asyncio.to_thread(bus.broker.wait_event, "paused")
            bus.broker.kill()
            places.reverse()
            await asyncio.to_thread(bus.start_broker, there)
            await updating
            await agent.wait_for_engines(2)
            version = await update(agent, 3)
            assert version is not None
            [choice] = (await asked).choices
            assert len(choice.token_ids) == TOKENS
            [choice] = (
                await rollouts.generate(PROMPT, {"max_tokens": 4, "ignore_eos": True})
            ).choices
            assert [span.version for span in choice.spans] == [version]

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    shown = run_wavebus("status", "--broker", bus.address)
    assert "e0" in shown.stdout
    assert "e1" in shown.stdout
