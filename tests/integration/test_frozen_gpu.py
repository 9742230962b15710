"""An end of a communicator that dies, or stops, freezes no GPU of the others: they go on stepping.

Three processes, as a trainer and two engines, on GPUs that are made up
(:mod:`tests.support.frozen_gpu`). A broadcast may take an hour here, so a GPU that froze stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.bus_suite import until
from tests.support.frozen_gpu import LIMIT_S, End

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from pathlib import Path

SIZE = 3
STEPS = 50


@contextlib.asynccontextmanager
async def ends(folder: Path) -> AsyncIterator[list[End]]:
    """The trainer's, and two of engines."""
    made = [End(folder, rank, SIZE) for rank in range(SIZE)]
    try:
        port = made[0].answer()
        for end in made[1:]:
            end.send(port)
        for end in made:
            end.answer()
        yield made
    finally:
        for end in made:
            await end.close()


async def go_on(those: list[End]) -> None:
    """They make some more steps."""
    for end in those:
        await until(partial(has_made, end, end.ask("steps") + STEPS))


def has_made(end: End, steps: int) -> bool:
    return bool(end.ask("steps") >= steps)


def entered(folder: Path) -> int:
    """How many ends have entered the first broadcast."""
    return len(list(folder.iterdir()))


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 2 * LIMIT_S))


def test_a_broadcast_of_all_ends_for_all(tmp_path: Path) -> None:
    """Though each end's engine is in a step that waits for it."""

    async def scenario() -> None:
        async with ends(tmp_path) as all_ends:
            for end in (*all_ends, *all_ends):
                end.ask("launch")
            assert [end.ask("wait") for end in all_ends] == [""] * SIZE
            await go_on(all_ends)

    play(scenario())


@pytest.mark.parametrize("victim", [0, 2])
def test_ends_that_wait_for_another_go_on_when_it_dies(tmp_path: Path, victim: int) -> None:
    """It has announced nothing, so nobody has entered."""

    async def scenario() -> None:
        async with ends(tmp_path) as all_ends:
            others = [end for end in all_ends if end is not all_ends[victim]]
            for end in others:
                end.ask("launch")
            await go_on(others)
            await all_ends[victim].kill()
            assert all("closed or gone" in end.ask("wait") for end in others)
            await go_on(others)

    play(scenario())


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_ends_inside_a_broadcast_go_on_when_another_dies_or_stops(
    tmp_path: Path, fault: signal.Signals, victim: int
) -> None:
    """It has announced the broadcast, and does not enter. The others are inside: their GPUs freeze
    until the broadcast is aborted."""

    async def scenario() -> None:
        async with ends(tmp_path) as all_ends:
            others = [end for end in all_ends if end is not all_ends[victim]]
            all_ends[victim].ask("hang")
            for end in all_ends:
                end.ask("launch")
            await until(lambda: entered(tmp_path) == len(others))
            all_ends[victim].signal(fault)
            await go_on(others)
            for end in others:
                assert "gone" in (why := end.ask("wait")) or "silent" in why

    play(scenario())
