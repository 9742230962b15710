"""The examples that bring all they need run through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_colocated_one_loses_no_token() -> None:
    """A request lives through three sleeps, each with an update."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "colocated.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=EXAMPLES.parent,
    )
    assert ended.returncode == 0, ended.stderr
    assert "200 of 200 tokens, by versions [0, 1, 2, 3]" in ended.stdout
