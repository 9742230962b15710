"""The page of waves and pauses is what the code is: its diagrams, and the tests it names."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.diagrams import diagrams, fill_page

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/waves.md").read_text(encoding="utf-8")


def test_its_diagrams_are_the_machines_tables() -> None:
    """Else: ``python -m tests.support.diagrams --write docs/waves.md``."""
    assert fill_page(PAGE) == PAGE


def test_it_shows_every_machine_that_has_a_table() -> None:
    """Each once."""
    assert re.findall(r"<!-- diagram: (\S+) -->", PAGE) == list(diagrams())


def test_the_tests_that_it_names_exist() -> None:
    """Each by its file and function."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 20
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"\bdef {test}\(", (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_the_mutants_that_it_names_exist() -> None:
    """In the last column of its table of guarantees."""
    rows = [line for line in PAGE.splitlines() if re.match(r"\| \*\*\d+\. ", line)]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[3])]
    assert [row.split("**")[1].split(".")[0] for row in rows] == ["1", "2", "3", "9"]
    assert named
    assert [name for name in named if not (ROOT / f"tests/mutants/{name}.patch").exists()] == []
