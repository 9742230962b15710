"""The fault matrix, cell by cell, on the embedded engine."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import pytest

from tests.faults.cell import Play
from tests.faults.matrix import CELLS, OUTCOMES, SHARE, Cell, outcome_of
from tests.faults.world import World
from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.procs import run_wavebus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ALL: Final = os.environ.get("WAVEBUS_CHAOS_FAULTS") == "all"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=8, experts=4, max_positions=2048)


class Stage:
    """A world for one cell after the other; a new one after a cell that failed."""

    def __init__(self, checkpoint: Checkpoint, folders: pytest.TempPathFactory) -> None:
        self._checkpoint = checkpoint
        self._folders = folders
        self._runner = asyncio.Runner()
        self._world: World | None = None

    def play(self, cell: Cell) -> str:
        """See :meth:`tests.faults.cell.Play.run`."""
        return self._runner.run(self._play(cell))

    def close(self) -> None:
        self._runner.run(self._end())
        self._runner.close()

    async def _play(self, cell: Cell) -> str:
        if self._world is None:
            self._world = World(self._folders.mktemp("faults"), self._checkpoint)
            await self._world.__aenter__()
        world = self._world
        try:
            return await Play(world, cell).run()
        except BaseException as error:
            error.add_note(world.last_words())
            error.add_note(_told_by(world.folder / "journal"))
            await self._end()
            raise

    async def _end(self) -> None:
        if self._world is not None:
            await self._world.__aexit__()
            self._world = None


def _told_by(journal: Path) -> str:
    """The end of the journal, and what it is that is waited for."""
    shown = run_wavebus("journal", "show", str(journal)).stdout.splitlines()
    steps = [line for line in shown if "HEARTBEAT" not in line and "CORE_STATUS" not in line]
    why = run_wavebus("why", "--journal", str(journal)).stdout
    return "\n".join([*steps[-80:], why])


@pytest.fixture(scope="module")
def stage(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(checkpoint, tmp_path_factory)
    yield stage
    stage.close()


@pytest.mark.parametrize("cell", CELLS if ALL else SHARE, ids=str)
def test_cell(stage: Stage, cell: Cell, record_property: Callable[[str, object], None]) -> None:
    """See :mod:`tests.faults.cell` for what must be true of each."""
    outcome = stage.play(cell)
    record_property("outcome", outcome)
    assert outcome in OUTCOMES[outcome_of(cell)][1]
