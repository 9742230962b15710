"""`wavebus routes`: what a router sees."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from tests.support.procs import run_wavebus, wavebus
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from tests.integration.conftest import Bus
    from tests.support.procs import Proc

LIMIT_S = 60.0


def named(line: str) -> tuple[str, int, list[str]]:
    told: dict[str, Any] = json.loads(line)
    return told["group"], told["version"], [engine["engine"] for engine in told["engines"]]


def test_a_router_hears_of_a_commit_of_a_restart_and_of_the_next_commit(bus: Bus) -> None:
    """Who comes back with the weights that it was booted with gets no requests before the next."""
    first = bus.sidecar("e0")
    bus.sidecar("e1")
    watch: Proc = bus.add(wavebus("routes", "--broker", bus.address, "--follow", "--json"))
    told = named(watch.first_line())
    while told[2] != ["e0", "e1"]:  # one may be told of before the other
        told = named(watch.first_line())
    weights = load_file(f"{bus.checkpoint.folder}/model.safetensors")
    with SyncTrainerAgent(bus.address) as agent:
        assert agent.update_weights(weights) == 1
        assert named(watch.first_line()) == ("policy", 1, ["e0", "e1"])
        first.stop()
        assert named(watch.first_line()) == ("policy", 1, ["e1"])
        bus.sidecar("e0")
        shown = run_wavebus("routes", "--broker", bus.address)
        assert shown.stdout.startswith("policy version 1: e1 http://")
        agent.wait_for_engines(2)
        assert agent.update_weights(weights) == 2
        assert named(watch.first_line()) == ("policy", 2, ["e0", "e1"])
    assert watch.stop() == 0


def test_a_router_sees_which_engines_prefill_and_which_decode(bus: Bus) -> None:
    """In text, as JSON, and in the status; an update of the pair is of both or none."""
    watch: Proc = bus.add(wavebus("routes", "--broker", bus.address, "--follow", "--json"))
    for role in ("prefill", "decode"):
        bus.sidecar(role[0], "--role", role)
    told = json.loads(watch.first_line())
    while len(told["engines"]) < 2:
        told = json.loads(watch.first_line())
    assert {each["engine"]: each["pd_role"] for each in told["engines"]} == {
        "p": "prefill",
        "d": "decode",
    }
    shown = run_wavebus("routes", "--broker", bus.address).stdout
    assert re.fullmatch(
        r"policy version 0: d http://\S+ \(decode\), p http://\S+ \(prefill\)\n", shown
    )
    table = run_wavebus("status", "--broker", bus.address).stdout
    assert re.search(r"d +- +decode", table)
    assert re.search(r"p +- +prefill", table)
    with SyncTrainerAgent(bus.address) as agent:
        agent.wait_for_engines(2)
        assert agent.update_weights(load_file(f"{bus.checkpoint.folder}/model.safetensors")) == 1
    joined = [each for each in bus.broker.events if each.get("event") == "peer_joined"]
    assert {each["peer"]: each.get("pd_role") for each in joined if "kind" in each} == {
        "p": "prefill",
        "d": "decode",
    }


def test_following_ends_with_its_reader(bus: Bus) -> None:
    """Though nothing changes that would have to be printed."""
    watch: Proc = bus.add(wavebus("routes", "--broker", bus.address, "--follow"))
    bus.sidecar("e0")
    assert watch.first_line().startswith("policy version 0: e0 ")
    assert watch.process.stdout is not None
    watch.process.stdout.close()
    assert watch.process.wait(LIMIT_S) == 0


def test_without_a_broker_it_says_so() -> None:
    """Followed or not, with the exit code of what can't be reached."""
    for extra in ((), ("--follow",)):
        address = ("--broker", "tcp://127.0.0.1:1", "--timeout-s", "0.5")
        shown = run_wavebus("routes", *address, *extra)
        assert shown.returncode == 3
        assert "127.0.0.1:1" in shown.stderr
