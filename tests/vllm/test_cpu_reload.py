"""What vLLM's own reload does to a mixture of experts on a CPU, and what wavebus does about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm._vllm import boot_environment, make_moe, require_vllm

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0


def reloaded(folder: Path, *, repaired: bool) -> dict[str, Any]:
    """See :mod:`tests.vllm._reload`."""
    model = make_moe(folder / "model", seed=1)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.vllm._reload", str(model), str(int(repaired))],
        env={**os.environ, **boot_environment(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def test_vllm_leaves_experts_unpacked(tmp_path: Path) -> None:
    """The very weights that it serves, loaded once more, are others afterwards, and so are its
    tokens: experts are packed when they are first loaded, and never again. When this fails, vLLM
    has mended it, and ``bench gap`` may compare experts on CPUs, too."""
    told = reloaded(tmp_path, repaired=False)
    assert told["changed"]
    assert all(".routed_experts.w" in name for name in told["changed"])
    assert not told["same_tokens"]


def test_wavebus_has_them_packed(tmp_path: Path) -> None:
    """Then nothing has changed."""
    assert reloaded(tmp_path, repaired=True) == {"changed": [], "same_tokens": True}
