"""Metrics of several engines in one text."""

from __future__ import annotations

import pytest

from trainer_agent._rollouts.routes.metrics import MergedMetrics

TOKENS = '# HELP tokens_total Tokens.\n# TYPE tokens_total counter\ntokens_total{engine="0"} %s\n'


def test_counters_and_histograms_are_summed_and_gauges_named() -> None:
    text = (
        TOKENS + "# HELP t Time.\n# TYPE t histogram\n"
        't_bucket{le="0.5",m="a"} 1.0\nt_bucket{le="+Inf",m="a"} %s\n'
        't_count{m="a"} 3\nt_sum{m="a"} 0.5\n'
        "# HELP running Requests.\n# TYPE running gauge\nrunning %s\n"
        '# TYPE info gauge\ninfo{path="a \\"b\\" {x}, y"} 1 1700000000\n'
    )
    merged = MergedMetrics().merge({"e0": text % (1, 3, 7), 'e"1': text % ("2.5", 4, "NaN")})
    assert merged.splitlines() == [
        "# HELP tokens_total Tokens.",
        "# TYPE tokens_total counter",
        'tokens_total{engine="0"} 3.5',
        "# HELP t Time.",
        "# TYPE t histogram",
        't_bucket{le="0.5",m="a"} 2.0',
        't_bucket{le="+Inf",m="a"} 7.0',
        't_count{m="a"} 6.0',
        't_sum{m="a"} 1.0',
        "# HELP running Requests.",
        "# TYPE running gauge",
        'running{wavebus_engine="e0"} 7.0',
        'running{wavebus_engine="e\\"1"} NaN',
        "# TYPE info gauge",
        'info{path="a \\"b\\" {x}, y",wavebus_engine="e0"} 1.0',
        'info{path="a \\"b\\" {x}, y",wavebus_engine="e\\"1"} 1.0',
    ]


def test_no_sum_falls() -> None:
    """Neither when an engine is gone, nor when one has restarted."""
    metrics = MergedMetrics()

    def total(**values: float) -> str:
        merged = metrics.merge({name: TOKENS % value for name, value in values.items()})
        return merged.splitlines()[-1].split()[-1]

    assert total(e0=10, e1=5) == "15.0"
    assert total(e1=6) == "16.0"  # e0 did not answer
    assert total(e0=11, e1=6) == "17.0"
    assert total(e0=2, e1=6) == "19.0"  # 11 in its life before
    assert total(e0=3, e1=7) == "21.0"


@pytest.mark.parametrize(
    "line", ["tokens_total", "tokens_total{a 1", "tokens_total x", "#", "# EOF"]
)
def test_malformed_lines_are_left_out(line: str) -> None:
    assert MergedMetrics().merge({"e0": TOKENS % 1 + line + "\n"}).splitlines()[2:] == [
        'tokens_total{engine="0"} 1.0'
    ]
    assert MergedMetrics().merge({}) == ""
