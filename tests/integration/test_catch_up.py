"""Engines that are behind are brought to the group's version by the agent alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from bus._protocol.core.config import BrokerConfig
from bus._protocol.group.timeouts import next_deadline_ms
from bus._weight_transfer.registry import register_receiver, register_sender
from bus._weight_transfer.shm import ShmReceiver, ShmSender
from bus.errors import EngineError, UpdateFailed
from bus.messages import NackCode
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar._supervision.launch import free_port
from sidecar.embedded import EmbeddedEngine
from tests.contract.bus_suite import until
from tests.integration.test_dp_restart import group, moe
from tests.integration.test_killed import engines, generate
from tests.support.broker import a_broker
from tests.support.checkpoints import perturbed
from tests.support.procs import run_wavebus
from tests.support.serving import an_engine, assert_serve
from tests.support.steps import ByStep
from trainer_agent import SyncTrainerAgent, TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from bus._protocol.group.group import Group
    from bus._runtime.broker_server import BrokerServer
    from bus.operations import ArmManifest, Done
    from tests.integration.conftest import Bus
    from tests.support.checkpoints import Checkpoint

__all__ = ["moe"]

PROMPT = [5, 9, 7]
TOKENS = 24
LIMIT_S = 120.0
FAST = BrokerConfig(heartbeat_ms=200, peer_timeout_ms=10_000, retry_ms=100)


@pytest.fixture
def journal(bus: Bus, tmp_path: Path) -> Path:
    """Where the bus's broker, from now on, records."""
    folder = tmp_path / "journal"
    bus.broker.kill()
    bus.broker = bus.start_broker(bus.address, "--journal", str(folder))
    assert bus.broker.first_line() == bus.address
    return folder


@contextlib.contextmanager
def served(endpoint: str) -> Iterator[list[list[int]]]:
    """Requests to an engine, one after the other, for the length of a block; their tokens."""
    answers: list[list[int]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(generate(endpoint, TOKENS))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield answers
    finally:
        over.set()
        asking.join()


def caught_up(bus: Bus, version: int, ranks: int) -> None:
    """The next catch-up is over."""
    bus.broker.wait_event("committed", version=version, engines=ranks)
    bus.broker.wait_event("resumed")


def paused(bus: Bus, journal: Path) -> list[list[str]]:
    """Whom the broker has ever told to pause, by its journal."""
    assert bus.broker.stop() == 0
    done = run_wavebus("journal", "show", str(journal), "--json", "--message", "PAUSE_LOCAL")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [sorted(each["peers"]) for each in told if each["what"] == "out"]


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_who_restarts_or_comes_late_is_brought_to_the_version_while_another_serves(
    bus: Bus, journal: Path, backend: str
) -> None:
    """Nobody calls anything. The one that serves hears of no pause, and answers as before; then an
    update goes to all three."""
    bus.sidecar("e0")
    victim = bus.sidecar("e1")
    checkpoint = bus.checkpoint
    first, second = (perturbed(checkpoint.weights, seed) for seed in (21, 22))
    oracle = checkpoint.greedy(first, PROMPT, TOKENS)
    with SyncTrainerAgent(
        bus.address, keep_last=True, backend=backend, chunk_bytes=20_000
    ) as agent:
        agent.wait_for_engines(2)
        assert agent.update_weights(first, how="paused") == 1
        bus.broker.wait_event("resumed")
        with served(engines(bus)["e0"].endpoint) as answers:
            victim.kill()
            bus.broker.wait_event("peer_lost", peer="e1")
            before = len(answers)
            for name in ("e1", "e2"):
                bus.sidecar(name)
                caught_up(bus, 1, 1)
                engine = engines(bus)[name]
                assert (engine.version, engine.phase) == (1, "running")
                assert generate(engine.endpoint, TOKENS) == oracle
        assert len(answers) > before
        assert answers == [oracle] * len(answers)
        assert agent.update_weights(second, how="paused") == 2
        for engine in engines(bus).values():
            assert generate(engine.endpoint, 8) == checkpoint.greedy(second, PROMPT, 8)
    assert paused(bus, journal) == [["e0", "e1"], ["e1"], ["e2"], ["e0", "e1", "e2"]]


def test_who_comes_late_takes_no_request_before_it_has_the_version(bus: Bus) -> None:
    """Whoever sends them, past all routes: it has booted closed, and stays so. Then the next update
    opens admission."""
    bus.sidecar("e0")
    checkpoint = bus.checkpoint
    first, second = (perturbed(checkpoint.weights, seed) for seed in (31, 32))
    with SyncTrainerAgent(bus.address, chunk_bytes=20_000) as agent:
        agent.wait_for_engines(1)
        assert agent.update_weights(first, how="paused") == 1
        bus.broker.wait_event("resumed")
        bus.sidecar("late")
        endpoint = engines(bus)["late"].endpoint
        assert generate(endpoint, TOKENS) == []
        assert generate(engines(bus)["e0"].endpoint, 8) == checkpoint.greedy(first, PROMPT, 8)
        assert agent.update_weights(second, how="paused") == 2
        bus.broker.wait_event("resumed")
        assert generate(endpoint, TOKENS) == checkpoint.greedy(second, PROMPT, TOKENS)


def test_an_engine_that_boots_without_a_broker_serves_when_it_has_joined(
    checkpoint: Checkpoint,
) -> None:
    """Nobody knows before what its group serves: requests are refused, with the reason. Its group
    has committed nothing, so it then serves its checkpoint's weights. A sidecar that ends first
    leaves it closed: the engine ends with it."""

    async def scenario() -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        engine = EmbeddedEngine(checkpoint.folder, boot_closed=True)
        async with Sidecar(engine, broker=address, name="e0") as sidecar:
            assert sidecar.info is not None
            endpoint = sidecar.info.endpoint
            assert await asyncio.to_thread(generate, endpoint, 8) == []
            async with a_broker(listen=address), TrainerAgent(address) as agent:
                await agent.wait_for_engines(1, timeout_s=60)
                expected = checkpoint.greedy(checkpoint.weights, PROMPT, 8)
                assert await asyncio.to_thread(generate, endpoint, 8) == expected
                assert (await agent.status()).groups[0].routable == ("e0",)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


@pytest.mark.slow
def test_a_dp_group_catches_up_in_lockstep_beside_one_that_serves(
    bus: Bus, journal: Path, moe: Checkpoint
) -> None:
    """A rank is killed, both are restarted, and both are brought to the version as one."""
    bus.sidecar("dense", "--model", str(moe.folder))
    group(bus, moe)
    first = perturbed(moe.weights, 23)
    oracle = moe.greedy(first, PROMPT, TOKENS)
    with SyncTrainerAgent(bus.address, keep_last=True, chunk_bytes=20_000) as agent:
        agent.wait_for_engines(3)
        assert agent.update_weights(first, how="paused") == 1
        bus.broker.wait_event("resumed")
        before = engines(bus)
        with served(before["dense"].endpoint) as answers:
            os.kill(before["moe-1"].pid, signal.SIGKILL)
            caught_up(bus, 1, 2)
            after = engines(bus)
            for name in ("moe-0", "moe-1"):
                assert after[name].pid != before[name].pid
                assert (after[name].version, after[name].phase) == (1, "running")
                assert generate(after[name].endpoint, TOKENS) == oracle
        assert answers == [oracle] * len(answers)
    assert paused(bus, journal) == [["dense", "moe-0", "moe-1"], ["moe-0", "moe-1"]]


# In this process


def run(scenario: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, LIMIT_S)

    asyncio.run(bounded())


class FlipsOnce(ShmSender):
    """Flips a bit of the third chunk, once, after its sums were taken."""

    left: ClassVar[int] = 0

    def transfer(self, seq: int) -> None:
        if seq == 2 and FlipsOnce.left:
            FlipsOnce.left -= 1
            self._segments[seq % self.prefetch_depth].memory.view(torch.uint8)[0] ^= 1


def test_all_that_a_broken_update_has_quarantined_come_back_alone(bus: Bus) -> None:
    """To the version that nobody serves any more, from what was kept before the update broke."""
    register_sender("shm-flips-once", FlipsOnce)
    register_receiver("shm-flips-once", ShmReceiver)
    checkpoint = bus.checkpoint
    first, second = (perturbed(checkpoint.weights, seed) for seed in (24, 25))

    async def scenario() -> None:
        async with (
            a_broker(config=FAST) as (server, broker),
            TrainerAgent(
                broker,
                keep_last=True,
                backend="shm-flips-once",
                chunk_bytes=1 << 14,
                verify="full",
            ) as agent,
            an_engine(checkpoint, broker, "e0") as e0,
            an_engine(checkpoint, broker, "e1") as e1,
        ):
            await agent.wait_for_engines(2)
            assert await agent.update_weights(first, how="paused") == 1
            FlipsOnce.left = 1
            with pytest.raises(UpdateFailed) as failed:
                await agent.update_weights(second, how="paused")
            assert failed.value.code is NackCode.CHECKSUM_MISMATCH
            state = server.machine.groups["policy"]
            assert set(state.registry.quarantined) == {"e0", "e1"}
            assert state.routing.now.engines == ()
            await until(lambda: len(state.routing.now.engines) == 2)
            assert not state.registry.quarantined
            await assert_serve(checkpoint, first, 1, e0, e1)
            version = await agent.update_weights(second, how="paused")
            await assert_serve(checkpoint, second, version, e0, e1)

    run(scenario())


class Slow(ByStep, StubEngine):
    """Its check of a manifest waits for ``may_arm``; with ``refuses``, it never takes one."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.arming = asyncio.Event()
        self.may_arm = asyncio.Event()
        self.may_arm.set()
        self.committed: list[int] = []

    async def on_arm(self, arm: ArmManifest) -> Done:
        self.arming.set()
        await self.may_arm.wait()
        if self.refuses:
            raise EngineError("it takes none", code=NackCode.MANIFEST_REFUSED)
        return await self.proceed(arm)

    async def commit(self, version: int) -> None:
        self.committed.append(version)


WEIGHTS: Mapping[str, Tensor] = {"w": torch.ones(64)}


@dataclass(frozen=True)
class Running:
    """A bus, and an agent that keeps weights."""

    agent: TrainerAgent
    server: BrokerServer
    broker: str
    stack: contextlib.AsyncExitStack

    async def join(self, name: str, engine: StubEngine) -> Sidecar:
        sidecar = Sidecar(engine, broker=self.broker, name=name)
        return await self.stack.enter_async_context(sidecar)

    @property
    def group(self) -> Group:
        return self.server.machine.groups["policy"]

    def version_of(self, name: str) -> int:
        known = self.group.registry.engines.get(name)
        return known.version if known else 0


@contextlib.asynccontextmanager
async def updated(engine: StubEngine) -> AsyncIterator[Running]:
    """One that serves version 1, which the agent keeps."""
    async with contextlib.AsyncExitStack() as stack:
        server, broker = await stack.enter_async_context(a_broker(config=FAST))
        agent = await stack.enter_async_context(TrainerAgent(broker, keep_last=True))
        running = Running(agent, server, broker, stack)
        await running.join("serves", engine)
        await agent.wait_for_engines(1)
        assert await agent.update_weights(WEIGHTS, how="paused") == 1
        yield running


@pytest.mark.parametrize("asked", ["update", "pause"])
def test_what_the_trainer_asks_for_goes_first(asked: str) -> None:
    """An engine that catches up gives way: it is undone, and takes part."""

    async def scenario() -> None:
        serves, late = Slow(), Slow()
        async with updated(serves) as bus:
            late.may_arm.clear()
            await bus.join("late", late)
            await late.arming.wait()
            if asked == "update":
                asking = asyncio.create_task(bus.agent.update_weights(WEIGHTS, how="paused"))
            else:
                asking = asyncio.create_task(held(bus.agent))
            state = bus.group
            await until(lambda: state.update.state.value == "aborting")
            late.may_arm.set()
            assert await asking == 2
            await until(lambda: bus.version_of("late") == state.version)
        if asked == "update":
            assert (serves.committed, late.committed) == ([1, 2], [2])
        else:
            assert (serves.committed, late.committed) == ([1], [1])

    async def held(agent: TrainerAgent) -> int:
        async with agent.paused() as ack:
            return ack.engines

    run(scenario())


def test_one_that_takes_no_weights_holds_up_nobody() -> None:
    """Together they fail; then each is tried alone, and the good one comes to the version."""

    async def scenario() -> None:
        serves, bad, good = Slow(), Slow(refuses=True), Slow()
        async with updated(serves) as bus:
            await asyncio.gather(bus.join("a-bad", bad), bus.join("b-good", good))
            await until(lambda: bus.version_of("b-good") == 1)
            assert bus.version_of("a-bad") == 0
        assert (serves.committed, bad.committed, good.committed) == ([1], [], [1])

    run(scenario())


def test_an_agent_that_closes_undoes_what_is_under_way() -> None:
    """Its engines are let go, and no task is left behind."""

    async def scenario() -> None:
        serves, late = Slow(), Slow()
        async with updated(serves) as bus:
            late.may_arm.clear()
            sidecar = await bus.join("late", late)
            await late.arming.wait()
            closing = asyncio.create_task(bus.agent.close())
            state = bus.group
            await until(lambda: state.update.state.value == "aborting")
            late.may_arm.set()
            await closing
            await until(lambda: state.owner is None and not next_deadline_ms(state))
            assert sidecar.session.phase == "running"
            assert sidecar.session.is_stale

    run(scenario())
