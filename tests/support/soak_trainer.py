"""A trainer that sends one of two sets of weights, each time it is told to.

``python -m tests.support.soak_trainer BROKER FOLDER``, until stdin ends. It answers ``joined``,
then to each line ``COUNT WHICH HOW`` with the version committed on that many engines, who fell out,
and how it was loaded; or with the error's name.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import load_file

import bus.log
from bus.errors import WavebusError
from lab.bench.process import read_commands, write_answer
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from trainer_agent._options import How


async def main(broker: str, folder: str) -> None:
    """Until stdin ends."""
    first = load_file(f"{folder}/model.safetensors")
    other = {name: tensor + 0.05 * tensor.abs().mean() for name, tensor in first.items()}
    async with TrainerAgent(
        broker, name="trainer", lease_ms=6000, chunk_bytes=40_000, timeout_s=20.0
    ) as agent:
        write_answer(joined=True)
        async for line in read_commands():
            count, which, how = line.split()
            try:
                await agent.wait_for_engines(int(count), timeout_s=20.0)
                weights = other if which == "1" else first
                version = await agent.update_weights(weights, how=cast("How", how))
            except WavebusError as error:
                write_answer(error=f"{type(error).__name__}: {error}"[:300])
                continue
            assert agent.last_update is not None
            told = agent.last_update
            write_answer(version=version, excluded=told.excluded, how=told.how, why=told.why_paused)


if __name__ == "__main__":
    torch.set_num_threads(1)
    bus.log.configure(level="error", json=True)
    asyncio.run(main(*sys.argv[1:]))
