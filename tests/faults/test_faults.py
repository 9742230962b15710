"""The fault matrix, cell by cell, on the embedded engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest

from tests.faults.matrix import (
    CELLS,
    COLLECTIVE_CELLS,
    COLLECTIVE_SHARE,
    PAUSED_COLLECTIVE_CELLS,
    SHARE,
    SLOW_SHARE,
    STAGED_CELLS,
    STAGED_SHARE,
    Cell,
)
from tests.faults.stage import Stage
from tests.faults.world import World
from tests.support.checkpoints import Checkpoint, certain_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALL: Final = os.environ.get("WAVEBUS_CHAOS_FAULTS") == "all"
EACH: Final = (*CELLS, *STAGED_CELLS, *COLLECTIVE_CELLS, *PAUSED_COLLECTIVE_CELLS)
THESE: Final = EACH if ALL else (*SHARE, *STAGED_SHARE, *COLLECTIVE_SHARE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return certain_experts(tmp_path_factory.mktemp("moe"), max_positions=2048)


@pytest.fixture(scope="module")
def stage(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(lambda: World(tmp_path_factory.mktemp("faults"), checkpoint))
    yield stage
    stage.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=pytest.mark.slow if c in SLOW_SHARE else []) for c in THESE],
    ids=str,
)
def test_cell(stage: Stage, cell: Cell, record_property: Callable[[str, object], None]) -> None:
    """See :mod:`tests.faults.cell` for what must be true of each."""
    stage.check(cell, record_property)
