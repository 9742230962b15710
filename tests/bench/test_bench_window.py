"""What ``bench transfer --engine vllm`` makes of what it saw: gaps, windows, and their ratios.

The whole of it runs in ``tests/vllm``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus import operations as ops
from bus._cli.main import run
from lab.bench.harness import BenchFailed
from lab.bench.programs.vllm_server import called, foreign_plugins
from lab.bench.streams import gaps_ms, greedy, longest_gap_ms, percentile, streaming
from lab.bench.updates import UpdateRound
from lab.bench.vllm_transfer import figures_of, window
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.operations import PERFORM
from sidecar._vllm.plugin.worker_rpc import SWAP
from sidecar.embedded import EmbeddedEngine
from tests.support.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from lab.bench.programs.call_times import Call

LIMIT_S = 120.0


def test_control_is_when_no_tensor_moves() -> None:
    """In two of twelve seconds the trainer puts and the engine receives. In eight there are other
    calls, the setting of a version among them, and in two there is none. What overlaps counts
    once, and what was called before the update, or after it, not at all."""
    calls: list[Call] = [
        ("commit", -2, -1),
        ("arm", 0, 1),
        ("pause", 2, 4),
        ("start", 4, 5),
        ("collective_rpc", 5, 6),
        ("put", 6, 7),
        ("receive", 6.5, 8),
        ("commit", 7, 9),
        ("resume", 10, 13),
    ]
    figures, phases_ms = window(calls, 0, 12)
    assert figures == {"control_asks_ms": 8000, "control_idle_ms": 2000}
    assert (phases_ms["arm"], phases_ms["commit"]) == (1000, 2000)
    assert phases_ms["receive"] == 1500


def test_the_longest_gap_is_one_that_the_update_is_in() -> None:
    """Also of a token that came before it began, and of one that came after its end."""
    came = [[0.0, 1.0, 4.0, 5.0, 9.0], [0.5, 2.0, 3.5, 6.0]]
    assert longest_gap_ms(came, 3.0, 3.2) == 3000
    assert longest_gap_ms(came, 1.5, 5.5) == 4000
    assert longest_gap_ms([came[1]], 1.0, 3.0) == 1500


@pytest.mark.parametrize("came", [[], [2.0, 9.0], [0.0, 4.0]])
def test_a_request_that_missed_the_update_has_no_gap(came: list[float]) -> None:
    """One that began, or ended, in the middle of it would make the figure too small."""
    with pytest.raises(BenchFailed, match="tokens"):
        longest_gap_ms([[0.0, 9.0], came], 1.0, 5.0)


def test_ordinary_gaps_are_those_before_the_update() -> None:
    """Only whole ones."""
    came = [[0.0, 1.0, 3.0, 4.0], [1.5, 2.0, 9.0]]
    assert gaps_ms(came, 1.0, 4.0) == [2000, 1000, 500]
    assert percentile([5, 1, 4, 2, 3], 50) == 3
    assert percentile(range(1, 101), 99) == 99
    assert percentile([7], 50) == 7


def performing(operation: operations.WorkerOperation) -> dict[str, Any]:
    return {"method": PERFORM, "kwargs": {"operation": operations.encode(operation)}}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/pause", None, "pause"),
        ("/update_weight_version", {"new_version": "1"}, "commit"),
        ("/resume", None, "resume"),
        ("/collective_rpc", performing(ops.Start("model")), "start"),
        (
            "/collective_rpc",
            performing(ops.ReceiveChunk(0, "nccl", b"")),
            "receive",
        ),
        (
            "/collective_rpc",
            performing(ops.ReceiveChunk(0, "vllm:nccl", b"")),
            "update",
        ),
        ("/collective_rpc", performing(ops.LoadChunk(0, "full", (1,))), "load"),
        ("/collective_rpc", performing(ops.Finish()), "finish"),
        ("/collective_rpc", {"method": "wavebus_facts", "kwargs": {}}, "collective_rpc"),
        ("/collective_rpc", {"method": SWAP, "kwargs": {"version": 1}}, "swap"),
    ],
)
def test_calls_have_names(path: str, body: Any, name: str) -> None:
    """What goes through one route is told by its operation."""
    assert called(path, body) == name


def test_the_server_without_a_bus_is_without_wavebus() -> None:
    """Other plugins stay."""
    assert "wavebus" not in foreign_plugins()


def a_round(gap_ms: float, transfer_ms: float, control_ms: float) -> UpdateRound:
    figures = {
        "gap_ms": gap_ms,
        "transfer_ms": transfer_ms,
        "update_ms": 400.0,
        "window_ms": 200.0,
        "control_ms": control_ms,
        "control_asks_ms": control_ms,
        "control_idle_ms": 0.0,
        "control_share": control_ms / 400.0,
    }
    phases_ms = {"pause": 20.0, "update": transfer_ms}
    return UpdateRound(figures, [20.0, 30.0], phases_ms=phases_ms)


def test_ratios_are_of_medians() -> None:
    """Each way's, by native's and by the raw broadcast's."""
    found = figures_of(
        {
            "native": [a_round(gap, 100.0, 2.0) for gap in (200.0, 900.0, 100.0)],
            "bus_native": [a_round(gap, 100.0, 8.0) for gap in (210.0, 220.0, 90.0)],
            "bus": [a_round(gap, 50.0, 12.0) for gap in (150.0, 100.0, 160.0)],
        },
        [50.0, 10.0, 25.0],
        10_000_000_000,
    )
    assert (found["ratio_gap_bus_native"], found["ratio_gap_bus"]) == (1.05, 0.75)
    assert found["raw_gb_per_s"] == 400
    assert (found["ratio_raw_bus_native"], found["ratio_raw_bus"]) == (0.25, 0.5)
    assert [found[way]["control_share"] for way in ("native", "bus_native", "bus")] == [
        0.005,
        0.02,
        0.03,
    ]


def test_streams_are_followed_to_their_ends(tmp_path: Path) -> None:
    """Every token of every request is counted, and a pause is in the gap of all."""
    checkpoint = make_checkpoint(tmp_path, seed=3)

    async def scenario() -> None:
        engine = EmbeddedEngine(checkpoint.folder)
        url = (await engine.start()).endpoint
        try:
            async with streaming([url], 3, 200) as streams:
                await streams.have(5)
                loop = asyncio.get_running_loop()
                await engine.pause("keep", clear_cache=True)
                since_s = loop.time()
                assert all(count < 200 for count in streams.counts)
                await asyncio.sleep(0.1)  # the length of the pause is what is measured
                until_s = loop.time()
                await engine.resume()
            assert streams.counts == [200, 200, 200]
            assert longest_gap_ms(streams.came, since_s, until_s) >= 100
            assert len(await greedy(url, 12)) == 12
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_a_request_that_is_cut_short_breaks_the_bench(tmp_path: Path) -> None:
    """A figure of requests that were lost would be none."""
    checkpoint = make_checkpoint(tmp_path, seed=3)

    async def scenario() -> None:
        engine = EmbeddedEngine(checkpoint.folder)
        url = (await engine.start()).endpoint

        async def cut_short(url: str) -> None:
            async with streaming([url], 2, 200) as streams:
                await streams.have(5)
                await engine.abort_requests()

        try:
            with pytest.raises(BenchFailed, match="of 200 tokens"):
                await cut_short(url)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_vllms_own_trainer_engine_needs_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU another one is to be named; and one GPU is not enough."""
    wanted = ("bench", "transfer", "--engine", "vllm")
    assert run([*wanted, "--device", "cpu"]) == 2
    assert "--native-engine" in capsys.readouterr().err
    if torch.cuda.device_count() < 2:
        assert run([*wanted]) == 2
        assert "GPUs are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--requests", "0"),
        ("--tokens", "99"),
        ("--model-size", "huge"),
        ("--device", "tpu"),
        ("--chunk-megabytes", "0"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options exit with 2 and are named."""
    assert run(["bench", "transfer", "--engine", "vllm", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
