"""Several embedded engines in one process, each with its sidecar and with requests that never end.

``python -m tests.support.soak_engines LOAD BROKER FOLDER NAME...``, until stdin ends; LOAD is one
of :data:`LOADS`. It answers ``joined`` when all have been let in, and to each line with what its
requests came to. A request that ends with fewer tokens than it asked for, without being aborted,
or whose versions do not grow, is wrong.
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
from bus._runtime.json_lines import read_commands, write_answer
from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine, SamplingParams

if TYPE_CHECKING:
    from sidecar.embedded import VersionSpan

PROMPT: Final = (5, 9, 77, 31, 12)


@dataclass(frozen=True)
class Load:
    """``requests``: of an engine at a time. ``longest``: tokens, at most. ``rest_s``: between two,
    at most. ``step_ms``: of the engine, at least."""

    requests: int
    longest: int
    rest_s: float
    step_ms: float


LOADS: Final = {
    "now-and-then": Load(requests=1, longest=24, rest_s=0.3, step_ms=0.0),
    "always": Load(requests=8, longest=128, rest_s=0.0, step_ms=10.0),
}


@dataclass
class Counts:
    """Requests of all engines of this process."""

    ended: int = 0
    aborted: int = 0
    wrong: int = 0
    versions_met: int = 0  # requests over whose tokens the version changed


async def ask(engine: EmbeddedEngine, load: Load, rng: random.Random, counts: Counts) -> None:
    """Requests, one after the other."""
    while True:
        asked = rng.randint(1, load.longest)
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
        await asyncio.sleep(load.rest_s * rng.random())


def _grow(spans: tuple[VersionSpan, ...]) -> bool:
    versions = [span.version for span in spans]
    return versions == sorted(versions)


async def greedy(engine: EmbeddedEngine) -> list[int]:
    """What it serves now."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    deltas = [delta async for delta in engine.generate(PROMPT, params, stream=False)]
    return [token for delta in deltas for token in delta.token_ids]


async def main(load: Load, broker: str, folder: str, names: list[str]) -> None:
    """Until stdin ends."""
    counts = Counts()
    engines = {
        name: EmbeddedEngine(
            folder, host=None, max_num_seqs=load.requests + 3, step_ms=load.step_ms
        )
        for name in names
    }
    async with contextlib.AsyncExitStack() as stack:
        for name, engine in engines.items():
            sidecar = Sidecar(engine, broker=broker, group="policy", name=name)
            await stack.enter_async_context(sidecar)
            await sidecar.joined()
        write_answer(joined=names)
        tasks = [
            asyncio.create_task(ask(engine, load, random.Random(f"{name} {number}"), counts))
            for name, engine in engines.items()
            for number in range(load.requests)
        ]
        async for _ in read_commands():
            served = {name: await greedy(engine) for name, engine in engines.items()}
            dead = [repr(task.exception()) for task in tasks if task.done()]
            write_answer(**asdict(counts), served=served, dead=dead)
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    bus.log.configure(level="error", json=True)
    asyncio.run(main(LOADS[sys.argv[1]], sys.argv[2], sys.argv[3], sys.argv[4:]))
