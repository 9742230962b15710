"""A process killed in the middle leaves nobody stuck."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from bus._runtime.status_client import fetch_status
from bus._weight_transfer.gloo import GlooSender
from bus.errors import PauseFailed, UpdateFailed
from bus.rejection import is_closed
from tests.support.procs import ROOT, Proc
from trainer_agent import SyncTrainerAgent, TrainerAgent

if TYPE_CHECKING:
    from bus.messages import EngineView
    from tests.integration.conftest import Bus

LEASE_MS = 16_000


def generate(endpoint: str, tokens: int = 8) -> list[int]:
    """Ask an engine for tokens: one that is stuck in a pause would not answer, and one whose
    admission is closed gives none."""
    body = {
        "token_ids": [5, 9, 7],
        "sampling_params": {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{endpoint}/inference/v1/generate",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        if not is_closed(json.load(error)):
            raise
        return []
    found: list[int] = choice["token_ids"]
    return found


def engines(bus: Bus) -> dict[str, EngineView]:
    """The engines as the broker sees them."""
    status = asyncio.run(fetch_status(bus.address, timeout_s=60))
    return {engine.name: engine for group in status.groups for engine in group.engines}


def held_pause(bus: Bus, *extra: str) -> Proc:
    script = ROOT / "tests" / "support" / "held_pause.py"
    return bus.add(Proc(sys.executable, str(script), bus.address, *extra))


def test_trainer_killed_in_a_pause(bus: Bus) -> None:
    """When a trainer is killed while it holds a pause, its engines generate again."""
    bus.sidecar("e0")
    bus.sidecar("e1")
    trainer = held_pause(bus)
    assert trainer.first_line() == "paused"
    trainer.kill()
    bus.broker.wait_event("peer_lost", peer="trainer")
    bus.broker.wait_event("resumed")
    for engine in engines(bus).values():
        assert len(generate(engine.endpoint)) == 8


@pytest.mark.ci
def test_trainer_killed_in_the_middle_of_an_update(bus: Bus) -> None:
    """Engines that hold a part of an update are quarantined, and a whole one frees them."""
    bus.sidecar("e0")
    folder = str(bus.checkpoint.folder)
    trainer = held_pause(bus, folder)
    assert trainer.first_line() == "chunk"
    trainer.kill()
    bus.broker.wait_event("quarantined", peer="e0")
    with SyncTrainerAgent(bus.address, name="next", lease_ms=LEASE_MS) as agent:
        assert agent.update_weights(load_file(f"{folder}/model.safetensors"), how="paused") == 2
    engine = engines(bus)["e0"]
    assert (engine.version, engine.phase) == (2, "running")
    assert len(generate(engine.endpoint)) == 8


@pytest.mark.ci
def test_trainer_killed_in_the_middle_of_a_broadcast(bus: Bus) -> None:
    """Engines that wait in it are let go; what they hold a part of, a whole update mends."""
    for name in ("e0", "e1"):
        bus.sidecar(name)
    weights = f"{bus.checkpoint.folder}/model.safetensors"
    script = ROOT / "tests" / "support" / "dies_sending.py"
    bus.add(Proc(sys.executable, str(script), bus.address, weights, "2")).wait()
    quarantined: set[str] = set()
    while len(quarantined) < 2:  # an engine that is asked again to abort is named again
        quarantined.add(bus.broker.wait_event("quarantined")["peer"])
    assert quarantined == {"e0", "e1"}
    with SyncTrainerAgent(bus.address, name="next", lease_ms=LEASE_MS, backend="gloo") as agent:
        agent.wait_for_engines(2)
        assert agent.update_weights(load_file(weights), how="paused") == 2
    for engine in engines(bus).values():
        assert (engine.version, engine.phase) == (2, "running")
        assert len(generate(engine.endpoint)) == 8


@pytest.mark.ci
@pytest.mark.parametrize("chunk", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_engine_killed_in_the_middle_of_a_broadcast(
    bus: Bus, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks for everybody at once, and says so; the next update goes to who is left, by a
    communicator that is made before the dead one counts as lost."""
    bus.sidecar("e0")
    victim = bus.sidecar("e1")
    weights = load_file(f"{bus.checkpoint.folder}/model.safetensors")
    transfer = GlooSender.transfer

    def kill_and_transfer(self: GlooSender, seq: int) -> None:
        if seq == chunk:
            victim.kill()
        transfer(self, seq)

    with SyncTrainerAgent(
        bus.address, lease_ms=LEASE_MS, backend="gloo", chunk_bytes=20_000
    ) as agent:
        agent.wait_for_engines(2)
        with monkeypatch.context() as patched:
            patched.setattr(GlooSender, "transfer", kill_and_transfer)
            with pytest.raises(UpdateFailed, match="e1"):
                agent.update_weights(weights, how="paused")
        version = agent.update_weights(weights, how="paused")
        assert agent.last_update is not None
        assert agent.last_update.engines == 1
    engine = engines(bus)["e0"]
    assert (engine.version, engine.phase) == (version, "running")
    assert len(generate(engine.endpoint)) == 8


def test_sidecar_killed_in_a_pause(bus: Bus) -> None:
    """The others stay paused as long as the trainer wants, then resume; the dead one is named."""
    bus.sidecar("e0")
    victim = bus.sidecar("e1")

    async def main() -> None:
        async with TrainerAgent(bus.address, lease_ms=LEASE_MS) as agent:
            await agent.wait_for_engines(2)
            async with agent.paused():
                victim.kill()
                await asyncio.to_thread(bus.broker.wait_event, "peer_lost", peer="e1")
            status = await agent.status()
            assert [engine.name for engine in status.groups[0].engines] == ["e0"]

    asyncio.run(main())
    assert len(generate(engines(bus)["e0"].endpoint)) == 8


@pytest.mark.ci
def test_sidecar_stopped_before_a_pause(bus: Bus) -> None:
    """A pause that an engine can't join fails with its name, and the others have resumed."""
    import signal  # noqa: PLC0415 - used here alone

    bus.sidecar("e0")
    frozen = bus.sidecar("e1")

    async def main() -> None:
        async with TrainerAgent(bus.address, lease_ms=LEASE_MS) as agent:
            await agent.wait_for_engines(2)
            frozen.signal(signal.SIGSTOP)
            with pytest.raises(PauseFailed) as caught:
                async with agent.paused():
                    raise AssertionError("a group with a frozen engine was called paused")
            assert caught.value.nack.peer == "e1"
            async with agent.paused():  # without the lost one, it can be
                pass

    asyncio.run(main())
    assert len(generate(engines(bus)["e0"].endpoint)) == 8
    frozen.signal(signal.SIGCONT)
    bus.broker.wait_event("peer_joined", peer="e1")  # it comes back by itself
    assert len(generate(engines(bus)["e1"].endpoint)) == 8


def test_broker_killed_and_restarted(bus: Bus) -> None:
    """Engines find the next broker at the same address, and updates go on with the version."""
    bus.sidecar("e0")
    weights = load_file(bus.checkpoint.folder / "model.safetensors")
    with SyncTrainerAgent(bus.address, lease_ms=LEASE_MS) as agent:
        assert agent.update_weights(weights, how="paused") == 1
        assert len(generate(engines(bus)["e0"].endpoint)) == 8
        bus.broker.kill()
        bus.broker = bus.start_broker(bus.address)
        assert bus.broker.first_line() == bus.address
        joined = {bus.broker.wait_event("peer_joined")["role"] for _ in range(2)}
        assert joined == {"engine", "trainer"}
        assert agent.update_weights(weights, how="paused") == 2


@pytest.mark.ci
def test_broker_killed_in_a_pause(bus: Bus) -> None:
    """With broker and trainer both gone, engines resume when their lease is over."""
    sidecar = bus.sidecar("e0")
    endpoint = engines(bus)["e0"].endpoint
    trainer = held_pause(bus)
    assert trainer.first_line() == "paused"
    bus.broker.kill()
    trainer.kill()
    sidecar.wait_event("lease_expired")
    assert len(generate(endpoint)) == 8
