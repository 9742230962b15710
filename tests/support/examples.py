"""Runs the examples as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *options: str, env: Mapping[str, str] | None = None) -> str:
    """What it prints.

    Raises:
        AssertionError: it fails; with its stderr.
    """
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
