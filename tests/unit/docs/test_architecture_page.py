"""The page of the architecture names what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", PAGE)
MODULES = [
    path
    for name in ("bus", "sidecar", "trainer_agent", "lab")
    for path in ROOT.glob(f"{name}/**/*.py")
]


@pytest.mark.parametrize(("name", "file"), NAMED)
def test_a_function_is_in_the_file_that_is_named(name: str, file: str) -> None:
    """Paths are shortened there; files of vLLM are not looked at."""
    found = [path for path in MODULES if path.as_posix().endswith(f"/{file}")]
    if not file.startswith("vllm/v1"):
        assert found
    for part in name.split(".") if found else ():
        assert any(
            re.search(rf"(def|class) {part}\b", path.read_text(encoding="utf-8")) for path in found
        )


def test_functions_are_named() -> None:
    assert len(NAMED) > 3
