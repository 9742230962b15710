"""`wavebus demo --sessions`: sessions that are disturbed equal their undisturbed twins."""

from __future__ import annotations

import json

import pytest

from bus._cli.main import run
from lab.demo import twin
from lab.demo.plan import DemoPlan
from tests.support.procs import run_wavebus


@pytest.mark.ci
@pytest.mark.parametrize(
    ("sessions", "engines", "kill_every", "seconds", "kills"),
    [(16, 2, 4, 15, 1), pytest.param(64, 4, 10, 180, 10, marks=pytest.mark.slow)],
    ids=["share", "whole"],
)
def test_sessions_of_the_demo_equal_their_undisturbed_twins(
    sessions: int, engines: int, kill_every: int, seconds: int, kills: int
) -> None:
    """Engines are killed and updated meanwhile, in the middle of answers."""
    answer = run_wavebus(
        *("demo", "--json", "--sessions", str(sessions), "--engines", str(engines)),
        *("--kill-every", str(kill_every), "--seconds", str(seconds)),
        timeout_s=seconds + 240,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = json.loads(answer.stdout)
    assert (told["twin_differs"], told["unknown_spans"], told["lost"]) == (0, 0, 0)
    assert told["kills"] >= kills
    assert told["updates"] >= 2
    assert told["versions"] >= 3
    assert told["continued"] > 0
    assert told["cut_by"]["died"] > 0
    assert told["answers"] >= 6 * sessions
    assert told["tokens"] == told["answers"] * 48


@pytest.mark.parametrize("fault", ["twin_differs", "unknown_spans", "lost"])
def test_a_demo_with_one_bad_answer_fails(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it is one of many."""
    result = twin.TwinResult(DemoPlan(sessions=64), answers=1000)
    monkeypatch.setattr(twin.Twin, "run", lambda _: result)
    for wrong in (0, 1):
        setattr(result, fault, wrong)
        assert run(["demo", "--sessions", "64"]) == wrong
        assert f"{fault:20} {wrong}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more", [("--chaos",), ("--engine", "vllm"), ("--updates", "3"), ("--kill-every", "2")]
)
def test_sessions_are_for_the_embedded_engine(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Other options are refused."""
    assert run(["demo", "--sessions", "64", *more]) == 2
    assert "--" in capsys.readouterr().err
