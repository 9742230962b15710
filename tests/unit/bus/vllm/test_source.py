"""Reading vLLM's source."""

from __future__ import annotations

import ast
import gc
from typing import TYPE_CHECKING

import pytest

from bus._vllm.source import SourceTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFINITIONS = 300


class ParsesWhenItGoes:
    """Garbage in a cycle, which the collector alone ends."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("found = first + 2 * (third(fourth) - 5)")


@pytest.fixture
def collector() -> Iterator[None]:
    """As it was, afterwards."""
    threshold = gc.get_threshold()
    gc.collect()
    gc.disable()
    yield
    gc.set_threshold(*threshold)
    gc.enable()


@pytest.mark.usefixtures("collector")
def test_a_finalizer_that_parses_meanwhile_changes_nothing(tmp_path: Path) -> None:
    """The collector calls it in the middle: a tree of so many definitions makes it run."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    lines = [f"def f{n}(a, b=(1, {n})):\n    return a + b * (a - {n})" for n in range(DEFINITIONS)]
    (package / "long.py").write_text("\n".join(lines))
    tree = SourceTree(tmp_path)
    for _ in range(3):
        ParsesWhenItGoes()
    gc.set_threshold(1000)
    gc.enable()
    assert tree.find(f"vllm.long:f{DEFINITIONS - 1}") is not None
