"""Several embedded engines in one process, each with its sidecar and with requests that never end.

``python -m tests.support.soak_engines BROKER FOLDER NAME...``, until stdin ends. It answers
``joined`` when all have been let in, and to each line with what its requests came to. A request
that ends with fewer tokens than it asked for, without being aborted, or whose versions do not
grow, is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import torch

import bus.log
from bus.runtime.lines import answer, commands
from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine, SamplingParams

if TYPE_CHECKING:
    from sidecar.embedded import VersionSpan

LONGEST: Final = 24
REST_S: Final = 0.3  # between two requests of an engine, at most
PROMPT: Final = (5, 9, 77, 31, 12)


@dataclass
class Counts:
    """Requests of all engines of this process."""

    ended: int = 0
    aborted: int = 0
    wrong: int = 0
    versions_met: int = 0  # requests over whose tokens the version changed


async def ask(engine: EmbeddedEngine, rng: random.Random, counts: Counts) -> None:
    """Requests, one after the other."""
    while True:
        asked = rng.randint(1, LONGEST)
        params = SamplingParams(temperature=0.0, max_tokens=asked, ignore_eos=True)
        deltas = [delta async for delta in engine.generate(PROMPT, params, stream=False)]
        made = sum(len(delta.token_ids) for delta in deltas)
        spans = deltas[-1].weight_versions
        counts.ended += 1
        counts.versions_met += len(spans) > 1
        if deltas[-1].finish_reason == "abort":
            counts.aborted += 1
        elif made != asked or not _grow(spans):
            counts.wrong += 1
        await asyncio.sleep(REST_S * rng.random())


def _grow(spans: tuple[VersionSpan, ...]) -> bool:
    versions = [span.version for span in spans]
    return versions == sorted(versions)


async def greedy(engine: EmbeddedEngine) -> list[int]:
    """What it serves now."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    deltas = [delta async for delta in engine.generate(PROMPT, params, stream=False)]
    return [token for delta in deltas for token in delta.token_ids]


async def main(broker: str, folder: str, names: list[str]) -> None:
    """Until stdin ends."""
    counts = Counts()
    engines = {name: EmbeddedEngine(folder, host=None, max_num_seqs=4) for name in names}
    async with contextlib.AsyncExitStack() as stack:
        for name, engine in engines.items():
            sidecar = Sidecar(engine, broker=broker, group="policy", name=name)
            await stack.enter_async_context(sidecar)
            await sidecar.joined()
        answer(joined=names)
        tasks = [
            asyncio.create_task(ask(engine, random.Random(name), counts))
            for name, engine in engines.items()
        ]
        async for _ in commands():
            served = {name: await greedy(engine) for name, engine in engines.items()}
            dead = [repr(task.exception()) for task in tasks if task.done()]
            answer(**asdict(counts), served=served, dead=dead)
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    bus.log.configure(level="error", json=True)
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
