"""How ``bench gap`` starts vLLM servers, and ranks of them."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.errors import UsageError
from lab.bench import fleet
from lab.bench.harness import Bench
from lab.bench.plans import GapPlan
from lab.bench.programs.vllm_server import vllm_server

BUS = "tcp://127.0.0.1:1"


def plan(**changes: Any) -> GapPlan:
    usual = GapPlan(
        engine="vllm",
        model_size="moe",
        native_engine="ipc",
        backend="shm",
        requests=4,
        dp_size=2,
    )
    return replace(usual, **changes)


def ranks_of(this: GapPlan, engine: str, address: str) -> list[dict[str, Any]]:
    return fleet.server_settings(this, engine, "bus", address, Path("model"))


def option(settings: dict[str, Any], name: str) -> str:
    return str(settings["argv"][settings["argv"].index(name) + 1])


def test_each_rank_has_a_gpu_and_all_meet_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they share experts, not each expert."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    told = ranks_of(plan(), "wavebus", BUS)
    assert [each["variables"]["CUDA_VISIBLE_DEVICES"] for each in told] == ["4", "7"]
    assert [each["dp_rank"] for each in told] == [0, 1]
    assert [option(each, "--data-parallel-rank") for each in told] == ["0", "1"]
    assert len({option(each, "--data-parallel-rpc-port") for each in told}) == 1
    assert all("--enable-expert-parallel" in each["argv"] for each in told)
    assert not any("VLLM_ALLOW_INSECURE_SERIALIZATION" in each["variables"] for each in told)


def test_settings_are_the_servers_and_not_the_processes() -> None:
    """What `launch` takes itself would never reach the program."""
    taken = inspect.signature(Bench.launch).parameters.keys() - {"settings"}
    this = plan(dp_size=1)
    for settings in (
        *ranks_of(this, "wavebus", BUS),
        *ranks_of(plan(), "wavebus", BUS),
        *ranks_of(this, "ipc", ""),
    ):
        inspect.signature(vllm_server).bind(None, **settings)
        assert not taken & settings.keys()
    assert not taken & fleet.trainer_settings(this, BUS, ["native", "bus"], Path("model")).keys()


def test_vllm_alone_takes_handles_over_http() -> None:
    """Those of its IPC engine are pickled. On no bus it is no rank of that."""
    for each in ranks_of(plan(), "ipc", ""):
        assert each["variables"]["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
        assert not each.keys() & {"broker", "group", "dp_rank"}
        assert json.loads(option(each, "--weight-transfer-config")) == {"backend": "ipc"}


def test_a_cpu_has_no_expert_parallelism() -> None:
    """vLLM's build for it can't."""
    this = plan(model_size="tiny-moe", device="cpu", native_engine="pair")
    this.check()
    assert not any(
        "--enable-expert-parallel" in each["argv"] for each in ranks_of(this, "pair", "")
    )


def test_without_ranks_servers_are_on_the_second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is the trainer's; nobody is told of ranks."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    [told] = ranks_of(plan(dp_size=1, backend="nccl", native_engine="nccl"), "wavebus", BUS)
    assert told["variables"] == {"CUDA_VISIBLE_DEVICES": "1"}
    assert "dp_rank" not in told
    assert not any(word.startswith("--data-parallel") for word in told["argv"])


def test_servers_share_the_trainers_gpu_if_all_ways_are_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends of ipc are on one; NCCL's never are, whosever it is."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shared = plan(model_size="8b", dp_size=1, backend="ipc")
    shared.check()
    [told] = ranks_of(shared, "wavebus", BUS)
    assert told["variables"] == {"CUDA_VISIBLE_DEVICES": "0"}
    trainer = fleet.trainer_settings(shared, BUS, (), Path("model"))
    assert (trainer["device"], trainer["bus_device"]) == ("cuda:0", "cuda:0")
    assert trainer["gpus"] == ["cuda:0"]
    for apart in (replace(shared, native_engine="nccl"), replace(shared, backend="nccl")):
        with pytest.raises(UsageError, match="2 GPUs are needed, and there are 1: on one"):
            apart.check()


def test_where_both_ends_are_on_one_gpu_the_trainer_has_its_weights_there_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Since vLLM's NCCL has it on another."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both = plan(model_size="8b", dp_size=1, backend="ipc", native_engine="nccl")
    [told] = ranks_of(both, "wavebus", BUS)
    assert told["variables"] == {"CUDA_VISIBLE_DEVICES": "1"}
    trainer = fleet.trainer_settings(both, BUS, (), Path("model"))
    assert (trainer["device"], trainer["bus_device"]) == ("cuda:0", "cuda:1")


def test_as_many_gpus_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan().check()
    with pytest.raises(UsageError, match="3 GPUs are needed, and there are 2"):
        plan(dp_size=3).check()


def test_steps_are_kernel_by_kernel_or_one_graph() -> None:
    """Of as many requests as are measured; a CPU has no graphs."""
    [eager] = ranks_of(plan(dp_size=1), "wavebus", BUS)
    assert "--enforce-eager" in eager["argv"]
    [graphs] = ranks_of(plan(dp_size=1, cuda_graphs=True), "wavebus", BUS)
    assert "--enforce-eager" not in graphs["argv"]
    told = json.loads(option(graphs, "--compilation-config"))
    assert told["cudagraph_capture_sizes"] == [4]
    with pytest.raises(UsageError, match="a CPU has none"):
        plan(model_size="tiny-moe", device="cpu", cuda_graphs=True).check()
