"""Reading vLLM's source."""

from __future__ import annotations

import ast
import gc
from typing import TYPE_CHECKING

import pytest

from bus.vllm_source import SourceTree

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
def busy_collector() -> Iterator[None]:
    """It runs in the middle of whatever makes objects next."""
    threshold = gc.get_threshold()
    gc.collect()
    gc.disable()
    for _ in range(3):
        ParsesWhenItGoes()
    gc.set_threshold(50)
    gc.enable()
    yield
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("busy_collector")
def test_a_finalizer_that_parses_meanwhile_changes_nothing(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    lines = [
        f"def name_{n}(a, b=(1, {n})):\n    return a + b * (a - {n})" for n in range(DEFINITIONS)
    ]
    (package / "long.py").write_text("\n".join(lines))
    tree = SourceTree(tmp_path)
    assert tree.find(f"vllm.long:name_{DEFINITIONS - 1}") is not None
