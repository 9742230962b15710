"""The DP coordinator in vLLM's place of a coordinator: what is refused, and a process' life."""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sidecar._dp_coordinator.process import DpCoordinatorFailed, DpCoordinatorProcess
from sidecar._vllm.plugin import environment
from sidecar._vllm.plugin.core.dp_coordinator import BusCoordinator

if TYPE_CHECKING:
    from collections.abc import Iterator


def parallel(**changed: Any) -> Any:
    """vLLM's parallel configuration of a rank that the bus can coordinate."""
    usual = {
        "data_parallel_size": 2,
        "data_parallel_external_lb": True,
        "data_parallel_master_ip": "127.0.0.1",
        "enable_elastic_ep": False,
    }
    return SimpleNamespace(**{**usual, **changed})


@pytest.fixture
def on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.DP_GROUP, "moe")
    monkeypatch.setenv(environment.BROKER, "tcp://127.0.0.1:9")
    monkeypatch.setenv(environment.DP_COORDINATOR_PID, "0")


@pytest.fixture
def coordinator(on_the_bus: None) -> Iterator[BusCoordinator]:
    made = BusCoordinator(parallel(), enable_wave_coordination=True, logging_config=None)
    yield made
    made.shutdown()


def test_it_has_what_vllm_asks_of_it(coordinator: BusCoordinator) -> None:
    core_in, core_out = coordinator.get_engine_socket_addresses()
    addresses = {core_in, core_out, coordinator.get_stats_publish_address()}
    assert len(addresses) == 3
    assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)
    assert coordinator.proc.pid == int(os.environ[environment.DP_COORDINATOR_PID])
    assert coordinator.proc.name == "wavebus_coordinator_moe"
    assert coordinator.proc.is_alive()
    assert coordinator.proc.exitcode is None


def test_shutdown_ends_it_once_and_again(coordinator: BusCoordinator) -> None:
    assert not select.select([coordinator.proc.sentinel], [], [], 0)[0]
    coordinator.shutdown(timeout=60)
    assert coordinator.proc.exitcode == 0
    assert select.select([coordinator.proc.sentinel], [], [], 0)[0]
    coordinator.shutdown()


def test_its_death_is_logged(coordinator: BusCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    os.kill(coordinator.proc.pid, signal.SIGKILL)
    coordinator.proc.join(60)
    assert coordinator.proc.exitcode == -signal.SIGKILL
    deadline_s = time.monotonic() + 60
    while not caplog.records and time.monotonic() < deadline_s:
        time.sleep(0.01)
    [said] = caplog.records
    assert said.levelno == logging.ERROR
    assert "ended with exit code -9" in said.message


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_an_end_that_was_asked_for_is_not(how: str, caplog: pytest.LogCaptureFixture) -> None:
    process = DpCoordinatorProcess(dp_group="moe", size=2)
    getattr(process, how)()
    process.join(60)
    process.stop()
    assert not process.is_alive()
    assert not caplog.records


def test_a_forked_child_does_not_end_it(coordinator: BusCoordinator) -> None:
    """Engine cores are forked with the coordinator in their memory, and drop it there."""
    coordinator.proc._owner = -1
    coordinator.proc.stop()
    assert coordinator.proc.is_alive()
    coordinator.proc._owner = os.getpid()


def test_one_that_does_not_come_up() -> None:
    with pytest.raises(DpCoordinatorFailed, match="ended with exit code"):
        DpCoordinatorProcess(dp_group="moe", size=2, host="192.0.2.1")


@pytest.mark.parametrize(
    ("changed", "waves", "text"),
    [
        ({"data_parallel_external_lb": False}, True, "--data-parallel-external-lb"),
        ({"enable_elastic_ep": True}, True, "elastic"),
        ({}, False, "mixture-of-experts"),
    ],
)
def test_groups_that_it_cannot_coordinate(
    on_the_bus: None, changed: dict[str, Any], waves: bool, text: str
) -> None:
    """Each refusal says how to go on without it."""
    with pytest.raises(RuntimeError, match=text) as refused:
        BusCoordinator(parallel(**changed), waves)
    assert "leave WAVEBUS_DP_COORDINATOR unset (sidecar: --dp-coordinator vllm)" in str(
        refused.value
    )


def test_a_group_without_a_name(on_the_bus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.DP_GROUP)
    with pytest.raises(RuntimeError, match="needs WAVEBUS_DP_GROUP, which is not set"):
        BusCoordinator(parallel())


def test_the_environment_says_who_coordinates() -> None:
    assert environment.dp_coordinator({}) == "vllm"
    assert environment.dp_coordinator({environment.DP_COORDINATOR: "bus"}) == "bus"
    with pytest.raises(
        ValueError, match="WAVEBUS_DP_COORDINATOR=buss is not valid: set it to vllm or bus"
    ):
        environment.dp_coordinator({environment.DP_COORDINATOR: "buss"})
    told = environment.BusAddress("tcp://127.0.0.1:1", "policy", "moe")
    assert environment.bus_address(told.variables()) == told
