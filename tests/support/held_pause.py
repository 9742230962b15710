"""A trainer that takes a pause and holds it until it is killed, or begins an update too.

Run as a script: ``held_pause.py BROKER [FOLDER] [--when-told]``. With the folder of a checkpoint,
it sends that, and stops after the first of many chunks has been applied. ``--when-told``: says
``ready``, and begins when a line comes on stdin.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from bus._weight_transfer.shm import ShmSender
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class StuckSender(ShmSender):
    """Puts as many chunks as there is room for, and then no more."""

    def put(self, seq: int, tensors: Sequence[Tensor]) -> bytes:
        if seq >= self.prefetch_depth:
            threading.Event().wait()
        return super().put(seq, tensors)

    def on_taken(self, seq: int) -> None:
        super().on_taken(seq)
        print("chunk", flush=True)


async def main(broker: str, folder: str | None, *, when_told: bool) -> None:
    async with TrainerAgent(broker, name="trainer", lease_ms=14_000, chunk_bytes=20_000) as agent:
        agent._transport.sender = StuckSender()
        await agent.wait_for_engines(1)
        if when_told:
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        if folder is not None:
            weights = load_file(Path(folder) / "model.safetensors")
            await agent.update_weights(weights, how="paused")
        async with agent.paused(mode="keep"):
            print("paused", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    told = "--when-told" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--when-told"]
    asyncio.run(main(words[0], words[1] if len(words) > 1 else None, when_told=told))
