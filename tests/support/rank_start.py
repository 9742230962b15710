"""What an embedded rank does at its start in a test, though `wavebus sidecar` starts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOT: Final = Path(__file__).resolve().parents[2]
# Python runs this at its start. A rank is known by its command line, and nobody else waits for the
# imports.
_AT_START: Final = """\
import sys

if "--dp-rank" in sys.orig_argv:
    from tests.support.{module} import {function}

    {function}()
"""


def at_start(folder: Path, module: str, function: str, others: Mapping[str, str]) -> dict[str, str]:
    """``others``, and what makes ranks call this function of a module of the tests' support."""
    here = folder / "at_start"
    here.mkdir(exist_ok=True)
    code = _AT_START.format(module=module, function=function)
    (here / "sitecustomize.py").write_text(code, encoding="utf-8")
    path = [str(here), str(_ROOT), others.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    return {**others, "PYTHONPATH": os.pathsep.join(filter(None, path))}
