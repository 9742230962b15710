"""Where cells are played, one after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.faults.cell import Play
from tests.faults.matrix import ends_of
from tests.faults.staged import StagedPlay
from tests.support.procs import run_wavebus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.faults.matrix import Cell
    from tests.faults.world import World


class Stage:
    """A world for one cell after the other, as ``make`` makes it; a new one after a failure."""

    def __init__(self, make: Callable[[], World]) -> None:
        self._make = make
        self._runner = asyncio.Runner()
        self._world: World | None = None

    def play(self, cell: Cell) -> str:
        """See :meth:`tests.faults.cell.Play.run`."""
        return self._runner.run(self._play(cell))

    def check(self, cell: Cell, record: Callable[[str, object], None]) -> None:
        """Play it; the update must end as the page says, and how it did is recorded.

        Raises:
            AssertionError: it has ended otherwise, or :class:`tests.faults.world.Violation`.
        """
        outcome = self.play(cell)
        record("outcome", outcome)
        assert outcome in ends_of(cell)

    def close(self) -> None:
        self._runner.run(self._end())
        self._runner.close()

    async def _play(self, cell: Cell) -> str:
        if self._world is None:
            self._world = self._make()
            await self._world.__aenter__()
        world = self._world
        try:
            return await (StagedPlay if cell.staged else Play)(world, cell).run()
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
