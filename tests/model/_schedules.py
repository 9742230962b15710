"""Many schedules of :mod:`tests.model._chaos`, by several processes.

A module of its own, since those import it by its name, and pytest gives a test's module another.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Final

import bus.log
from tests.model import _chaos
from tests.support.procs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.model._chaos import Violation

BLOCK: Final = 50


def play_all(
    seeds: list[int], *, block: int = BLOCK, apart: bool
) -> tuple[Counter[str], list[str]]:
    """Which states they reached, and what was found. ``apart``: by as many processes as there are
    cores, a block at a time."""
    blocks = [seeds[first : first + block] for first in range(0, len(seeds), block)]
    if not apart:
        results = [play_block(each) for each in blocks]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(mp_context=context) as pool:
            results = list(pool.map(play_block, blocks))
    reach: Counter[str] = Counter()
    for reached, _ in results:
        reach += reached
    return reach, [told for _, violations in results for told in violations]


def play_block(seeds: list[int]) -> tuple[Counter[str], list[str]]:
    """Some of them, one after the other."""
    bus.log.configure(level="critical", json=True)
    reach: Counter[str] = Counter()
    try:
        found = [_chaos.play(seed, reach) for seed in seeds]
    finally:
        bus.log.configure()
    return reach, [told(each, ROOT / "build" / "chaos") for each in found if each is not None]


def told(violation: Violation, folder: Path) -> str:
    """In words; its journal is written into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed-{violation.seed}.journal"
    path.write_bytes(violation.data)
    return "\n".join(
        (
            f"schedule {violation.seed}: WAVEBUS_CHAOS_SEED={violation.seed} plays it again",
            f"its journal: wavebus journal show {path}; wavebus replay {path}",
            *violation.lines,
            violation.found,
        )
    )
