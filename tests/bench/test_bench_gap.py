"""``wavebus bench gap`` runs tiny, in real processes, and its figures agree with each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from bus._cli.main import run
from tests.support.procs import run_wavebus

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 600.0
WAYS = ("native", "paused", "staged")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--backend", "gloo", "--clear-cache"), ("--dp-size", "2")], ids=" ".join
)
def test_all_ways_alternate_in_one_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The command itself fails if a request doesn't get all its tokens, or engines don't serve what
    was sent."""
    answer = run_wavebus(
        *("bench", "gap", "--megabytes", "4", "--requests", "4", "--tokens", "600", "--json"),
        *("--rounds", "2", "--chunk-mb", "2", *options),
        cwd=tmp_path,
        timeout_s=LIMIT_S,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert (figures["engine"], figures["requests"], figures["rounds"]) == ("embedded", 4, 2)
    assert figures["weights_arrived"]
    assert (figures["requests_lost"], figures["requests_all"]) == (0, 24)
    for way in WAYS:
        seen = figures[way]
        assert len(seen["rounds"]["gap_ms"]) == 2
        assert 0 < seen["step_p50_ms"] <= seen["step_p99_ms"]
        assert 0 < seen["receive_ms"] < seen["update_ms"]
        assert seen["receive_gb_per_s"] > 0
    staged = figures["staged"]
    assert 0 < staged["swap_ms"] < staged["commit_ms"] < staged["update_ms"]
    for way in ("paused", "staged"):
        quotient = figures[way]["gap_ms"] / figures["native"]["gap_ms"]
        assert figures[f"ratio_gap_{way}_native"] == pytest.approx(quotient, abs=0.001)
    assert figures["ratio_throughput_receiving"] > 0
    assert figures["ratio_receive_raw"] > 0
    assert figures["ratio_swap_copy"] > 0
    assert figures["picture"] == "gap.png"
    assert (tmp_path / "gap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rounds", "0"),
        ("--requests", "0"),
        ("--tokens", "99"),
        ("--megabytes", "0"),
        ("--chunk-megabytes", "0"),
        ("--dp-size", "0"),
        ("--engine", "nope"),
        ("--backend", "nope"),
        ("--device", "tpu"),
        ("--model", "huge"),
        ("--nope",),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options exit with 2 and are named."""
    assert run(["bench", "gap", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_vllm_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's own trainer engines need GPUs, and so does all that is not for a CPU."""
    wanted = ("bench", "gap", "--engine", "vllm")
    for ranks in ((), ("--dp-size", "2")):
        assert run([*wanted, *ranks, "--device", "cpu"]) == 2
        assert "--native-engine" in capsys.readouterr().err
        if torch.cuda.device_count() < 2:
            assert run([*wanted, *ranks]) == 2
            assert "2 GPUs are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "tiny"), "--model moe or tiny-moe"),
        (("--requests", "1"), "each of the 2 ranks needs one"),
        (("--backend", "nccl"), "take shm or gloo"),
        (("--backend", "ipc"), "take shm or gloo"),
        (("--native-engine", "nccl"), "take ipc"),
    ],
    ids=" ".join,
)
def test_what_ranks_of_vllm_cannot_be(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is refused with what to do, on any host."""
    assert run(["bench", "gap", "--engine", "vllm", "--dp-size", "2", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_help_says_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    """And names what may be chosen."""
    assert run(["bench", "gap", "--help"]) == 0
    said = capsys.readouterr().out
    assert "time between tokens" in said
    assert "--picture" in said
