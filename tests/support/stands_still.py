"""A trainer that stands still in the middle of an update.

Run as a script: ``stands_still.py BROKER loop``: its source blocks the event loop, engines being
paused. ``stands_still.py BROKER rank``: it is rank 1 of two, and says when it gathers its tensors.
"""

from __future__ import annotations

import asyncio
import sys
import threading

import torch

from trainer_agent import SyncTrainerAgent, TrainerAgent

WEIGHTS = {str(number): torch.zeros(4) for number in range(8)}


def tell(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def stand_still() -> None:
    tell("stands")
    threading.Event().wait()


async def block_loop(broker: str) -> None:
    async with TrainerAgent(broker, name="trainer", lease_ms=12_000, chunk_bytes=16) as agent:
        await agent.wait_for_engines(1)
        await agent.update_weights(WEIGHTS, how="paused", on_sent=stand_still)


def be_rank_one(broker: str) -> None:
    with SyncTrainerAgent(broker, name="rank-1", rank=1, ranks=2) as agent:
        tell("joined")
        agent.update_weights(WEIGHTS)


if __name__ == "__main__":
    if sys.argv[2] == "loop":
        asyncio.run(block_loop(sys.argv[1]))
    else:
        be_rank_one(sys.argv[1])
