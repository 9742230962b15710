"""`wavebus demo --engine vllm`: the demo, with a real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.procs import run_wavebus
from tests.vllm._vllm import boot_environment, require_vllm

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_demo_updates_a_real_server(tmp_path: Path) -> None:
    """In the middle of its requests, and every token is of the weights that it is labelled with."""
    answer = run_wavebus(
        *("demo", "--engine", "vllm", "--updates", "6", "--json"),
        *("--picture", str(tmp_path / "demo.png")),
        env=boot_environment(tmp_path),
        timeout_s=900,
    )
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert (result["engine"], result["updates"]) == ("vllm", 6)
    assert (result["requests_lost"], result["mixed_tokens"]) == (0, 0)
    assert result["interrupted"] >= 0.8 * result["updates"]
    assert result["tokens_checked"] > 0
