"""The bench runs, cleans up after itself, and computes its ratios from its own figures."""

from __future__ import annotations

import json

import pytest

from bus._cli.main import run
from tests.support.procs import run_wavebus


@pytest.mark.slow
def test_figures_agree_with_each_other() -> None:
    """Every field is there; ratios are quotients of the medians that stand beside them."""
    answer = run_wavebus(
        *("bench", "control", "--engines", "4", "--rounds", "5", "--plain", "--json"),
        timeout_s=900,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert figures["engines"] == 4
    for part in ("http", "http_log", "raw", "plain"):
        assert figures[f"{part}_p50_ms"] > 0
        quotient = figures["bus_p50_ms"] / figures[f"{part}_p50_ms"]
        assert figures[f"ratio_{part}"] == pytest.approx(quotient, rel=0.02)
    assert figures["broker_cpu_us_per_engine_round"] >= 0
    assert figures["http_cpu_us_per_engine_round"] > 0
    assert figures["raw_cpu_us_per_engine_round"] > 0
    assert figures["ratio_cpu_raw"] >= 0


@pytest.mark.parametrize(
    "arguments", [("--engines", "0"), ("--rounds", "0"), ("--engines", "x"), ("--nope",)]
)
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options exit with 2 and are named."""
    assert run(["bench", "control", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
