"""``wavebus bench transfer --engine vllm``, whole, on a CPU: with a tiny model, gloo, and a trainer
and worker engine that are made like vLLM's own."""

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
NATIVE_PAIR = ("--backend", "gloo", "--native-engine", "pair")
WAYS = ("native", "bus_native", "bus")
OF_VLLM = ("pause", "start", "finish", "resume")


def test_all_ways_alternate_in_one_run(tmp_path: Path) -> None:
    """The command itself fails if a request doesn't get all its tokens. All servers serve what was
    sent, and the figures agree with each other."""
    answer = run_wavebus(
        *("bench", "transfer", "--engine", "vllm", "--device", "cpu", "--model-size", "tiny"),
        *(*NATIVE_PAIR, "--requests", "4", "--rounds", "2"),
        *("--tokens", "300", "--logs", str(tmp_path / "logs"), "--json"),
        env=boot_environment(tmp_path),
        timeout_s=LIMIT_S,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert (figures["engine"], figures["backend"], figures["rounds"]) == ("vllm", "gloo", 2)
    assert (figures["requests"], figures["tensors"]) == (4, 91)
    assert figures["weights_arrived"]
    assert figures["raw_gb_per_s"] > 0
    for way in WAYS:
        seen = figures[way]
        assert len(seen["gaps_ms"]) == 2
        assert seen["step_p50_ms"] <= seen["step_p99_ms"]
        assert seen["step_p99_ms"] > 0
        assert seen["transfer_ms"] > 0  # of it, what is packed before the pause is outside of that
        assert 0 < seen["window_ms"] <= seen["update_ms"]
        assert 0 < seen["control_ms"] < seen["update_ms"]
        assert 0 < seen["control_share"] < 1
        assert set(OF_VLLM) <= set(seen["phases_ms"])
        assert figures[f"ratio_raw_{way}"] > 0
    # Who updates in a pause makes a gap of at least that.
    assert max(figures["native"]["gaps_ms"]) > figures["native"]["phases_ms"]["update"]
    assert set(figures["native"]["phases_ms"]) == {*OF_VLLM, "update"}
    # Each step of the bus is one call of the engine's, and so is its whole chunk, natively.
    around = {"arm", *OF_VLLM, "commit"}
    assert set(figures["bus_native"]["phases_ms"]) == {*around, "update"}
    assert set(figures["bus"]["phases_ms"]) == {*around, "put", "send", "receive", "load"}
    native_gap = figures["native"]["gap_ms"]
    for way in ("bus_native", "bus"):
        ratio = figures[way]["gap_ms"] / native_gap
        assert figures[f"ratio_gap_{way}"] == pytest.approx(ratio, abs=0.001)
    # The server of vLLM's own flow has no wavebus in it, and the others have.
    logs = {way: (tmp_path / "logs" / f"{way}.log").read_text(errors="replace") for way in WAYS}
    made = "Creating weight transfer engine: "
    assert f"{made}PairWorkerEngine" in logs["native"]
    assert made not in logs["bus_native"]  # it is made by wavebus's factory
    assert f"{made}WavebusWeightTransferEngine" in logs["bus"]


def test_a_gateway_and_the_agent_alternate(tmp_path: Path) -> None:
    """Each has a server of its own, with a sidecar. The command fails if an update was not staged,
    or a request lost tokens."""
    answer = run_wavebus(
        *("bench", "transfer", "--engine", "vllm", "--device", "cpu", "--model-size", "tiny"),
        *("--gateway", *NATIVE_PAIR, "--requests", "4", "--rounds", "2", "--tokens", "300"),
        "--json",
        env=boot_environment(tmp_path),
        timeout_s=LIMIT_S,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert figures["weights_arrived"]
    assert figures["ratio_update_gateway"] > 0
    assert {"start", "update", "finish", "swap"} <= set(figures["gateway"]["phases_ms"])
    assert {"put", "send", "receive", "swap"} <= set(figures["agent"]["phases_ms"])
    for way in ("agent", "gateway"):
        assert not {"pause", "resume"} & set(figures[way]["phases_ms"])
