"""Commands in an installation without their extras say which one to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run_without(module: str, *command: str) -> str:
    """What `wavebus` prints in a process that can't import a module."""
    program = f"import sys; sys.modules[{module!r}] = None; from bus._cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize("module", ["torch", "aiohttp", "transformers", "matplotlib"])
def test_the_demo_names_its_extra(module: str) -> None:
    assert f"the demo needs {module}: install wavebus[demo]" in run_without(module, "demo")


@pytest.mark.parametrize("module", ["torch", "fastapi"])
def test_benches_name_their_extra(module: str) -> None:
    said = run_without(module, "bench", "control")
    assert f"this bench needs {module}: pip install 'wavebus[bench]'" in said
