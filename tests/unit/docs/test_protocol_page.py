"""The page of the protocol is what the code is: the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")


def test_the_machines_that_it_names_exist() -> None:
    """In the first column of the table of all machines."""
    rows = [line for line in PAGE.splitlines() if re.match(r"\| `[\w/]+\.py`", line)]
    named = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[1])]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "bus/protocol" / name).exists()] == []
