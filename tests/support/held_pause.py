"""A trainer that takes a pause and holds it until it is killed, or begins an update too.

Run as a script: ``held_pause.py BROKER [update]``. With ``update``, it stops after the
first of many chunks has been applied.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from safetensors.torch import load_file

from bus.messages import Message, WeightChunkMeta
from trainer_agent import TrainerAgent


class Stuck(TrainerAgent):
    """Sends one chunk and then no more."""

    async def _step(self, message: Message) -> object:  # type: ignore[override]
        if isinstance(message, WeightChunkMeta) and message.chunk == 1:
            print("chunk", flush=True)
            await asyncio.Event().wait()
        return await super()._step(message)


async def main(broker: str, folder: str | None) -> None:
    async with Stuck(broker, name="trainer", lease_ms=6000, chunk_bytes=20_000) as agent:
        await agent.wait_for_engines(1)
        if folder is not None:
            await agent.update_weights(load_file(Path(folder) / "model.safetensors"))
        async with agent.paused(mode="keep"):
            print("paused", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
