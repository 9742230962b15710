"""The bench runs tiny, cleans up after itself, and counts time that overlaps once."""

from __future__ import annotations

import json

import pytest

from bus._cli.main import run
from lab.bench.gateway import compared
from lab.bench.transfer import covered_s
from tests.support.procs import run_wavebus


@pytest.mark.slow
def test_figures_agree_with_each_other() -> None:
    """Every field is there; no part of an update takes longer than the whole."""
    answer = run_wavebus(
        *("bench", "transfer", "--megabytes", "4", "--tensors", "300", "--rounds", "2", "--json"),
        timeout_s=900,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert (figures["engine"], figures["backend"], figures["rounds"]) == ("embedded", "shm", 2)
    assert figures["megabytes"] == pytest.approx(4, rel=0.2)
    assert figures["tensors"] == pytest.approx(300, rel=0.1)
    assert figures["two_memcpy_gb_per_s"] > 0
    quotient = figures["transfer_gb_per_s"] / figures["memcpy_gb_per_s"]
    assert figures["ratio_memcpy"] == pytest.approx(quotient, abs=0.001)
    lent = figures["lent_transfer_gb_per_s"] / figures["lent_memcpy_gb_per_s"]
    assert figures["lent_ratio_memcpy"] == pytest.approx(lent, abs=0.001)
    assert 0 < figures["lent_pause_ms"] < figures["lent_paused_ms"] < figures["lent_update_ms"]
    assert 0 < figures["pause_ms"] < figures["paused_ms"] < figures["update_ms"]
    assert 0 < figures["small_control_ms"] < figures["small_update_ms"]


@pytest.mark.slow
def test_a_gateway_and_the_agent_alternate() -> None:
    """The command fails if an update was not staged, or if engines don't serve what was sent."""
    answer = run_wavebus(
        *("bench", "transfer", "--gateway", "--megabytes", "4", "--tensors", "300", "--json"),
        *("--rounds", "2"),
        timeout_s=900,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert (figures["engines"], figures["backend"], figures["rounds"]) == (2, "gloo", 2)
    assert figures["weights_arrived"]
    for prefix, megabytes in (("", 4), ("small_", 1)):
        assert figures[f"{prefix}megabytes"] == pytest.approx(megabytes, rel=0.3)
        assert figures[f"{prefix}ratio_update_gateway"] > 0
        agent, through = figures[f"{prefix}agent"], figures[f"{prefix}gateway"]
        routes = [f"{each}_weight_update_ms" for each in ("start", "finish")]
        assert 0 < through["update_weights_ms"] < through["update_ms"]
        assert agent.keys() == through.keys() - {*routes, "update_weights_ms"}
    assert figures["many_tensors"] == pytest.approx(300, rel=0.1)


def test_each_turn_is_compared_by_itself() -> None:
    """A host that is slow for a while slows both."""
    found = compared([10.0, 100.0, 20.0], [11.0, 120.0, 20.0])
    assert found == {"ratio_update_gateway": 1.1, "gateway_adds_ms": 1.0}


def test_a_gateway_and_shared_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """A client of vLLM's routes has no such transport."""
    assert run(["bench", "transfer", "--gateway", "--backend", "shm"]) == 2
    assert "take gloo" in capsys.readouterr().err


def test_moments_count_once() -> None:
    """Calls that overlap, or lie within each other, are no more than the time they cover."""
    assert covered_s([]) == 0
    assert covered_s([(5, 6), (1, 3), (2, 4), (2, 3)]) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ("--megabytes", "0"),
        ("--tensors", "1"),
        ("--rounds", "0"),
        ("--engine", "nope"),
        ("--backend", "nope"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options exit with 2 and are named."""
    assert run(["bench", "transfer", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_backend_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names those that are."""
    assert run(["bench", "transfer", "--backend", "nope"]) == 2
    assert "shm" in capsys.readouterr().err
