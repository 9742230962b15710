"""``wavebus bench rollout`` runs tiny, in real processes, and its figures agree with each other."""

from __future__ import annotations

import json

import pytest

from bus._cli.main import run
from tests.support.procs import run_wavebus


@pytest.mark.slow
def test_all_ways_alternate_in_one_run() -> None:
    """The command itself fails if a request doesn't get all its tokens."""
    answer = run_wavebus(
        *("bench", "rollout", "--rounds", "1", "--kills", "2", "--live", "64", "--json"),
        timeout_s=900,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert figures["live_streams"] == 64
    assert len(figures["live_rss_mb"]) == 5
    assert figures["live_gateway_peak_mb"] > 0
    assert figures["kill_answers"] > 0
    assert 0 < figures["kill_p50_ms"] <= figures["kill_p99_ms"]
    for name in ("token_ms", "tokens_per_s", "cpu_us_per_token"):
        quotient = figures[f"{name}_client"] / figures[f"{name}_bare"]
        assert figures[f"ratio_{name}"] == pytest.approx(quotient, rel=0.01)
    assert (
        0
        < figures["front_tokens_per_s_gateway"]
        == pytest.approx(
            figures["ratio_front_tokens_per_s"] * figures["front_tokens_per_s_bare"], rel=0.01
        )
    )
    if figures["router"]:
        assert figures["front_cpu_us_per_token_gateway"] > 0
        assert figures["front_cpu_us_per_token_router"] > 0
        assert figures["ttft_ms_router"] > 0


@pytest.mark.parametrize(
    "arguments", [("--rounds", "0"), ("--kills", "-1"), ("--live", "0"), ("--nope",)]
)
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options exit with 2 and are named."""
    assert run(["bench", "rollout", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
