"""What ``bench gap`` makes of what it saw: figures and a picture."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bus._cli.main import run
from lab.bench import fleet, gap, updates
from lab.bench.fleet import ServedAnswer, UpdatedEngines, without_experts
from lab.bench.gap import figures_of, typical
from lab.bench.programs.embedded_trainer import mixture
from lab.bench.streams import tokens_within
from lab.bench.updates import Measured, UpdateRound
from lab.network import Network

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZE_BYTES = 1_000_000_000


def a_round(gap_ms: float, *, receive_ms: float = 50.0, swap_ms: float = 0.0) -> UpdateRound:
    tokens = tuple((20.0 * step, 20.0) for step in range(-10, 0))
    found = {
        "gap_ms": gap_ms,
        "step_p50_ms": 20.0,
        "step_p99_ms": 30.0,
        "update_ms": 100.0,
        "receive_ms": receive_ms,
        "before_tokens_per_s": 1000.0,
    }
    if swap_ms:
        found |= {
            "swap_ms": swap_ms,
            "commit_ms": swap_ms * 2,
            "receiving_tokens_per_s": 900.0,
            "ratio_throughput_receiving": 0.9,
        }
    return UpdateRound(
        figures=found,
        steps_ms=(20.0,) * 98 + (30.0, 60.0),
        lost=0,
        tokens=(*tokens, (gap_ms - 10.0, gap_ms), (gap_ms + 10.0, 20.0)),
    )


def measured(*, arrived: bool = True) -> Measured:
    return Measured(
        {
            "native": [a_round(gap) for gap in (200.0, 900.0, 150.0)],
            "paused": [a_round(gap) for gap in (180.0, 100.0, 220.0)],
            "staged": [a_round(gap, receive_ms=100.0, swap_ms=12.0) for gap in (50.0, 45.0, 40.0)],
        },
        [25.0, 10.0, 50.0],
        [10.0, 8.0, 11.0],
        arrived,
    )


def some_figures(*, arrived: bool = True) -> dict[str, Any]:
    told = {"engine": "embedded", "backend": "shm", "megabytes": 1e3, "tensors": 9}
    found = figures_of(measured(arrived=arrived), requests=32, size_bytes=SIZE_BYTES)
    return {**told, "requests": 32, "rounds": 3, **found}


def test_ratios_are_of_medians() -> None:
    """Each stands beside what it is made of."""
    found = some_figures()
    assert [found[way]["gap_ms"] for way in ("native", "paused", "staged")] == [200, 180, 45]
    assert (found["ratio_gap_paused_native"], found["ratio_gap_staged_native"]) == (0.9, 0.225)
    assert (found["staged"]["step_p50_ms"], found["staged"]["step_p99_ms"]) == (20, 30)
    assert found["gap_over_p99_ms"] == 15
    assert found["staged"]["receive_gb_per_s"] == 10
    assert (found["raw_gb_per_s"], found["ratio_receive_raw"]) == (40, 0.25)
    assert (found["copy_ms"], found["ratio_swap_copy"]) == (10, 1.2)
    assert (found["receiving_throughput"], found["ratio_throughput_receiving"]) == (900, 0.9)
    assert (found["requests_all"], found["requests_lost"]) == (288, 0)
    assert found["native"]["rounds"]["gap_ms"] == [200, 900, 150]
    assert "swap_ms" not in found["paused"]
    json.dumps(found)


def test_experts_and_tokens_can_be_left_out() -> None:
    """Others' sums stay; tokens are those that are expected, if any are."""
    sums = {"model.norm.weight": "a", "model.layers.0.mlp.experts.routed_experts.w2_weight": "b"}
    left = {"model.norm.weight": "a"}
    assert without_experts(ServedAnswer((1, 2), sums)) == ServedAnswer((1, 2), left)
    assert without_experts(ServedAnswer((1, 2), sums), (3, 4)) == ServedAnswer((3, 4), left)


def test_the_round_that_is_shown_is_the_median_one() -> None:
    """Of two, the one next to the middle."""
    assert typical(measured().rounds["native"]).figures["gap_ms"] == 200
    assert typical([a_round(10.0), a_round(30.0)]).figures["gap_ms"] == 10


def test_tokens_count_by_their_time() -> None:
    """Of one that was made partly in the given time, that part; two that came at once, twice. What
    came first of a request has no gap, and doesn't count."""
    came, pieces = [[0.0, 1.0, 2.0], [0.5, 2.5]], [[1, 1, 1], [1, 2]]
    assert tokens_within(came, pieces, 0.0, 3.0) == 4
    assert tokens_within(came, pieces, 0.5, 1.5) == 0.5 + 0.5 + 1
    assert tokens_within(came, pieces, 3.0, 4.0) == 0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, with rounds that were made before; its exit code."""

    async def number() -> float:
        return 1.0

    async def nothing(*_: Any) -> Any: ...

    async def engines(*_: Any) -> UpdatedEngines:
        return UpdatedEngines(nothing, {}, {}, number, number, nothing, SIZE_BYTES, 9)

    def go(*options: object, arrived: bool = True) -> int:
        async def rounds(*_: Any) -> Measured:
            return measured(arrived=arrived)

        monkeypatch.setattr(fleet, "start_embedded", engines)
        monkeypatch.setattr(updates, "rounds_of", rounds)
        return run(["bench", "gap", *map(str, options)])

    return go


def test_the_picture_is_a_png(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one round each."""
    assert bench("--picture", tmp_path / "gap.png") == 0
    assert (tmp_path / "gap.png").read_bytes().startswith(b"\x89PNG")
    rows = capsys.readouterr().out.splitlines()
    assert ["picture", str(tmp_path / "gap.png")] in [row.split() for row in rows]
    assert ["native", "paused", "staged"] in [row.split() for row in rows]
    assert ["swap_ms", "12.0"] in [row.split() for row in rows]


def test_without_matplotlib_there_are_figures(
    bench: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And a word on how to get it."""
    monkeypatch.setattr(gap, "find_spec", lambda _: None)
    assert bench("--picture", tmp_path / "gap.png", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["picture"] is None
    assert "pip install" in said.err
    assert list(tmp_path.iterdir()) == []


def test_weights_that_did_not_arrive_fail_the_command(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the figures, all the same."""
    assert bench("--picture", tmp_path / "gap.png", arrived=False) == 1
    said = capsys.readouterr()
    assert "weights_arrived" in said.out
    assert "the weights that were sent" in said.err


@pytest.mark.parametrize("megabytes", [4, 64])
def test_a_model_is_about_as_large_as_asked_for(megabytes: int) -> None:
    """Within what attention and embeddings add."""
    size_bytes = sum(p.numel() * 4 for p in Network(mixture(megabytes)).parameters())
    assert megabytes < size_bytes / 1e6 < megabytes + 6
