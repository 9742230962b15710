"""`wavebus bench pause` measures two DP groups, and its figures agree."""

from __future__ import annotations

import json

import pytest

from tests.support.procs import run_wavebus


@pytest.mark.slow
def test_figures_agree_with_each_other() -> None:
    """What the bus adds to a first request is the difference of the medians beside it."""
    answer = run_wavebus("bench", "pause", "--rounds", "2", "--json", timeout_s=900)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert (figures["engine"], figures["dp_size"], figures["rounds"]) == ("embedded", 2, 2)
    direct, bus = figures["first_request_direct_ms"], figures["first_request_bus_ms"]
    assert direct > 0
    assert figures["first_request_more_ms"] == pytest.approx(bus - direct, abs=0.002)
