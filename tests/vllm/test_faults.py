"""Cells of the fault matrix, with a vLLM server that its sidecar supervises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.stage import Stage
from tests.vllm._faults import cells, make_world
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.matrix import Cell

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(lambda: make_world(tmp_path_factory.mktemp("faults"), "vllm"))
    yield stage
    stage.close()


@pytest.mark.parametrize("cell", cells("vllm"), ids=str)
def test_cell(stage: Stage, cell: Cell, record_property: Callable[[str, object], None]) -> None:
    """See :mod:`tests.faults.cell` for what must be true of each."""
    stage.check(cell, record_property)
