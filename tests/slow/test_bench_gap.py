"""``wavebus bench gap --engine vllm``, whole, on a CPU: with a tiny model, gloo, and a trainer and
worker engine that are made like vLLM's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.procs import run_wavebus
from tests.vllm._vllm import boot_environment, require_vllm

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm]

LIMIT_S = 900.0


def test_ranks_of_experts_are_updated_in_three_ways(tmp_path: Path) -> None:
    """The same of two DP groups. vLLM's own update leaves experts unpacked on a CPU
    (:mod:`tests.vllm.test_cpu_reload`), so these are not compared; what both ranks on the bus
    answer is compared with the trainer's model instead."""
    answer = run_wavebus(
        *("bench", "gap", "--engine", "vllm", "--device", "cpu", "--dp-size", "2"),
        *("--model", "tiny-moe", "--native-engine", "pair", "--requests", "4", "--rounds", "1"),
        *("--tokens", "400", "--chunk-mb", "32", "--logs", str(tmp_path / "logs")),
        *("--picture", str(tmp_path / "gap.png"), "--json"),
        env=boot_environment(tmp_path),
        timeout_s=LIMIT_S,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert (figures["model"], figures["dp_size"], figures["backend"]) == ("tiny-moe", 2, "shm")
    assert (figures["tensors"], figures["weights_arrived"]) == (345, True)
    assert "experts" in figures["not_compared"]
    assert (figures["requests_lost"], figures["requests_all"]) == (0, 12)
    for way in ("native", "paused", "staged"):
        assert 0 < figures[way]["receive_ms"] < figures[way]["update_ms"]
    assert 0 < figures["staged"]["swap_ms"] < figures["staged"]["commit_ms"]
    made = "Creating weight transfer engine: "
    for name, worker in (("native", "PairWorkerEngine"), ("bus", "WavebusWeightTransferEngine")):
        for rank in range(2):
            log = (tmp_path / f"logs/{name}-{rank}.log").read_text(errors="replace")
            assert f"{made}{worker}" in log


def test_vllm_servers_are_updated_in_three_ways(tmp_path: Path) -> None:
    """The command itself fails if a request doesn't get all its tokens, or a server doesn't serve
    what was sent."""
    answer = run_wavebus(
        *("bench", "gap", "--engine", "vllm", "--device", "cpu", "--model", "tiny"),
        *("--backend", "gloo", "--native-engine", "pair", "--requests", "4", "--rounds", "2"),
        *("--tokens", "600", "--chunk-mb", "32", "--logs", str(tmp_path / "logs")),
        *("--picture", str(tmp_path / "gap.png"), "--json"),
        env=boot_environment(tmp_path),
        timeout_s=LIMIT_S,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert (figures["engine"], figures["backend"], figures["rounds"]) == ("vllm", "gloo", 2)
    assert (figures["tensors"], figures["weights_arrived"]) == (91, True)
    assert (figures["requests_lost"], figures["requests_all"]) == (0, 24)
    for way in ("native", "paused", "staged"):
        seen = figures[way]
        assert 0 < seen["step_p50_ms"] <= seen["step_p99_ms"]
        assert 0 < seen["receive_ms"] < seen["update_ms"]
    # Who updates in a pause makes a gap of at least what it receives in that.
    native = figures["native"]["rounds"]
    assert max(native["gap_ms"]) > min(native["receive_ms"])
    staged = figures["staged"]
    assert 0 < staged["swap_ms"] < staged["commit_ms"]
    assert figures["ratio_throughput_receiving"] > 0
    assert figures["ratio_swap_copy"] > 0
    assert (tmp_path / "gap.png").exists()
    # The server of vLLM's own flow has no wavebus in it.
    made = "Creating weight transfer engine: "
    for name, worker in (("native", "PairWorkerEngine"), ("bus", "WavebusWeightTransferEngine")):
        assert f"{made}{worker}" in (tmp_path / f"logs/{name}.log").read_text(errors="replace")
