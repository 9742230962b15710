"""LoRA adapters over the bus: engines that only collect them, and one that has none."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

from bus._lora import adapter_of, removes_adapter
from bus._weight_transfer.allocation import StagingCapacity
from bus._weight_transfer.registry import make_receiver
from bus._weight_transfer.shm import ShmReceiver
from bus.errors import Refused, UpdateFailed, UsageError
from bus.messages import NackCode
from bus.operations import (
    ArmManifest,
    Done,
    Finish,
    LoadChunk,
    Open,
    ReceiveChunk,
    Restore,
)
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar._transfer.chunk_receiver import ChunkReceiver
from sidecar._transfer.lora import IncomingAdapter
from sidecar._transfer.verification import check_sums
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint
from tests.support.serving import an_engine, assert_serve
from tests.support.steps import ByStep
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bus._manifest import Manifest
    from bus.messages import EngineView, PauseMode
    from sidecar.engine import EngineInfo

LIMIT_S = 120.0
NAME = "policy-lora"
LAYER = "base_model.model.q_proj"
CONFIG = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
ROOT = Path(__file__).resolve().parents[2]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        f"{LAYER}.lora_A.weight": torch.full((2, 4), value),
        f"{LAYER}.lora_B.weight": torch.full((4, 2), value),
    }


class Collects(ByStep, StubEngine):
    """Receives as a worker of vLLM does, and has the last adapter in the place of a model.

    Attributes:
        serves: the value of the adapter's tensors; None: it has no adapter.
        opened: the backends that were opened.
        chunks: how many chunks the last update had.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        self.fails = False
        self.serves: float | None = None
        self.paused = False
        self.restored = asyncio.Event()
        self.resumed = asyncio.Event()
        self.opened: list[str] = []
        self.chunks = 0
        self._before: float | None = None
        self._incoming: IncomingAdapter | None = None
        self._removes = False
        self._receiver = ChunkReceiver(torch.device("cpu"))
        self._manifest: Manifest | None = None

    async def start(self) -> EngineInfo:
        return replace(await super().start(), dp_rank=self._rank, dp_size=self._ranks)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        self.paused = True
        return 0

    async def resume(self) -> None:
        self.paused = False
        self.resumed.set()

    async def close(self) -> None:
        self._receiver.close()

    async def on_open(self, opening: Open) -> Done:
        backend, params = opening.backend, opening.params
        self.opened.append(backend)
        self._incoming, carrier = None, backend
        self._removes = removes_adapter(backend)
        if self._removes:
            return Done()
        if adapter := adapter_of(backend):
            self._incoming = IncomingAdapter(adapter, params)
            carrier, params = self._incoming.backend, self._incoming.params
        receiver = make_receiver(carrier)
        self._receiver.use(backend, receiver)
        await asyncio.to_thread(receiver.open, params, opening.place)
        return Done(ahead=receiver.prefetch_depth)

    async def on_arm(self, arm: ArmManifest) -> Done:
        if arm.drops_adapters:
            self.serves = None
        self._manifest, self._before = arm.manifest, self.serves
        self._receiver.clear()
        if self._incoming is not None:
            self._incoming.begin()
        return Done(room=StagingCapacity(why_not="a stub has no weights"))

    async def on_receive(self, chunk: ReceiveChunk) -> None:
        assert self._manifest is not None
        chunks = [self._manifest.chunk(seq) for seq in range(self._manifest.chunks)]
        self._receiver.begin(chunk.seq, chunks, chunk.backend, chunk.handle)

    async def on_load(self, chunk: LoadChunk) -> None:
        seq = chunk.seq
        received = await asyncio.to_thread(self._receiver.take, seq)
        check_sums(seq, received, chunk.verify, chunk.sums)
        if self._incoming is not None:
            self._incoming.add(received)
        self._receiver.release(seq)
        if self.fails:
            raise RuntimeError("no room for it")
        assert self._manifest is not None
        self.chunks = self._manifest.chunks
        if self._incoming is not None and seq + 1 == self.chunks:
            whole = self._incoming.take()
            assert tuple(whole) == self._manifest.names
            [value] = {float(value) for tensor in whole.values() for value in tensor.flatten()}
            self.serves = value

    async def on_finish(self, _finish: Finish) -> None:
        if self._removes:
            self.serves = None
            if self.fails:
                raise RuntimeError("half of the workers")

    async def on_restore(self, _restore: Restore) -> None:
        self.serves = self._before
        self.restored.set()


def run(scenario: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, LIMIT_S))


async def engines_of(agent: TrainerAgent) -> dict[str, EngineView]:
    status = await agent.status()
    return {engine.name: engine for engine in status.groups[0].engines}


def test_every_engine_reads_the_adapter() -> None:
    """Between two updates of the model's weights, over the agent's own transport."""
    first, second = Collects(), Collects()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(first, broker=broker, name="e0"),
            Sidecar(second, broker=broker, name="e1"),
            TrainerAgent(broker, name="trainer", verify="full") as agent,
        ):
            await agent.wait_for_engines(2)
            weights = {"w": torch.zeros(4)}
            assert await agent.update_weights(weights) == 1
            version = await agent.update_adapter(NAME, tensors(3.0), config=CONFIG, label="three")
            assert version == 2
            report = agent.last_update
            assert report is not None
            assert (report.label, report.engines, report.verified) == ("three", 2, "full")
            assert report.size_bytes == 64
            assert (first.serves, second.serves) == (3.0, 3.0)
            assert await agent.update_weights(weights) == 3
            assert first.opened == second.opened == ["shm", f"lora:{NAME}", "shm"]

    run(scenario())


def test_a_trainer_engine_is_to_be_made_anew() -> None:
    """Its transport went when engines opened the adapter's."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(Collects(), broker=broker, name="e0"),
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(1)
            await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            agent.source({"w": torch.zeros(4)})
            with pytest.raises(Refused, match="create the trainer engine again") as refused:
                await asyncio.to_thread(agent.client().start_weight_update)
            assert refused.value.code is NackCode.TRANSFER_CLOSED

    run(scenario())


def test_an_engine_that_fails_to_load_serves_the_one_before() -> None:
    """The other one goes on with the new one. Nobody is mixed, and nobody quarantined; the next
    update brings both to the same."""
    good, bad = Collects(), Collects()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(good, broker=broker, name="good"),
            Sidecar(bad, broker=broker, name="bad"),
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(2)
            await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            bad.fails = True
            bad.resumed.clear()
            version = await agent.update_adapter(NAME, tensors(2.0), config=CONFIG)
            report = agent.last_update
            assert report is not None
            assert report.excluded == ("bad",)
            await bad.resumed.wait()
            assert (good.serves, bad.serves) == (2.0, 1.0)
            views = await engines_of(agent)
            assert [views[name].version for name in ("good", "bad")] == [version, version - 1]
            bad.fails = False
            version = await agent.update_adapter(NAME, tensors(3.0), config=CONFIG)
            assert (good.serves, bad.serves) == (3.0, 3.0)
            views = await engines_of(agent)
            assert {(view.version, view.phase) for view in views.values()} == {(version, "running")}

    run(scenario())


@pytest.mark.ci
def test_a_trainer_that_is_killed_leaves_the_adapter_before() -> None:
    """Both engines have loaded, and none has committed: they go back, and run."""
    engines = [Collects(), Collects()]

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(engines[0], broker=broker, name="e0"),
            Sidecar(engines[1], broker=broker, name="e1"),
        ):
            script = ROOT / "tests" / "support" / "dies_with_adapter.py"
            dies = await asyncio.create_subprocess_exec(
                *(sys.executable, str(script), broker, "2"),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            assert await dies.wait() == -9
            for engine in engines:
                await engine.restored.wait()
                await engine.resumed.wait()
                assert (engine.serves, engine.paused) == (None, False)
            async with TrainerAgent(broker, name="next") as agent:
                await agent.wait_for_engines(2)
                await agent.update_adapter(NAME, tensors(4.0), config=CONFIG)
            assert [engine.serves for engine in engines] == [4.0, 4.0]

    run(scenario())


def test_an_embedded_engine_has_no_adapters(tmp_path: Path) -> None:
    """It is named before anything happens, and serves on."""
    checkpoint = make_checkpoint(tmp_path / "model", seed=3)

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(Collects(), broker=broker, name="reads"),
            an_engine(checkpoint, broker, "small") as engine,
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(2)
            with pytest.raises(UpdateFailed) as refused:
                await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            assert refused.value.code is NackCode.BACKEND_MISSING
            assert refused.value.nack.peer == "small"
            with pytest.raises(UpdateFailed) as refused:
                await agent.remove_adapter(NAME)
            assert refused.value.code is NackCode.BACKEND_MISSING
            await assert_serve(checkpoint, checkpoint.weights, 0, engine)
            assert await agent.update_weights(checkpoint.weights) == 1
            await assert_serve(checkpoint, checkpoint.weights, 1, engine)

    run(scenario())


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's host has another tmpfs than engines of this process."""
    monkeypatch.setattr("bus._weight_transfer.shm.SHM_FOLDER", "/nonexistent")
    monkeypatch.setattr("bus._weight_transfer.formats.SHM_FOLDER", "/nonexistent")


@pytest.mark.usefixtures("elsewhere")
def test_engines_of_other_hosts() -> None:
    """They share no file with the trainer: the adapter comes over its backend, in chunks. Of one
    transport, until the config changes, or a model takes its place."""
    engines = [Collects(), Collects()]
    other = {**CONFIG, "lora_alpha": 4}

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(engines[0], broker=broker, name="e0"),
            Sidecar(engines[1], broker=broker, name="e1"),
            TrainerAgent(broker, name="trainer", backend="gloo", chunk_bytes=32) as agent,
        ):
            await agent.wait_for_engines(2)
            for value, config in ((1.0, CONFIG), (2.0, CONFIG), (3.0, other)):
                await agent.update_adapter(NAME, tensors(value), config=config)
                assert [(each.serves, each.chunks) for each in engines] == [(value, 2)] * 2
            opened = [f"lora:{NAME}"] * 2
            assert [each.opened for each in engines] == [opened] * 2
            await agent.update_weights({"w": torch.zeros(4)})
            assert [each.opened for each in engines] == [[*opened, "gloo"]] * 2
            await agent.update_adapter(NAME, tensors(4.0), config=other)
            assert [each.serves for each in engines] == [4.0] * 2

    run(scenario())


def test_every_engine_removes_the_adapter() -> None:
    """By an update with a version and a label, that brings nothing; and again, where none is."""
    first, second = Collects(), Collects()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(first, broker=broker, name="e0"),
            Sidecar(second, broker=broker, name="e1"),
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(2)
            before = await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            for label in ("gone", "gone already"):
                version = await agent.remove_adapter(NAME, label=label)
                assert version > before
                before = version
                report = agent.last_update
                assert report is not None
                assert (report.label, report.size_bytes, report.excluded) == (label, 0, ())
                assert (first.serves, second.serves) == (None, None)
                views = await engines_of(agent)
                assert {(v.version, v.phase) for v in views.values()} == {(version, "running")}
            await agent.update_adapter(NAME, tensors(2.0), config=CONFIG)
            assert (first.serves, second.serves) == (2.0, 2.0)

    run(scenario())


def test_an_engine_that_missed_a_removal_drops_the_adapter_before_it_serves() -> None:
    """It fails the removal, and keeps the adapter, but takes no requests. Before it serves the next
    weights, it drops all adapters; the one that did not fail keeps what it has."""
    good, bad = Collects(), Collects()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(good, broker=broker, name="good"),
            Sidecar(bad, broker=broker, name="bad"),
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(2)
            await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            bad.fails = True
            bad.resumed.clear()
            await agent.remove_adapter(NAME)
            report = agent.last_update
            assert report is not None
            assert report.excluded == ("bad",)
            await bad.resumed.wait()
            assert (good.serves, bad.serves) == (None, 1.0)
            bad.fails = False
            good.serves = 7.0
            version = await agent.update_weights({"w": torch.zeros(4)})
            assert (good.serves, bad.serves) == (7.0, None)
            views = await engines_of(agent)
            assert {(view.version, view.phase) for view in views.values()} == {(version, "running")}

    run(scenario())


def test_a_removal_that_all_engines_fail_is_undone() -> None:
    engine = Collects()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(engine, broker=broker, name="e0"),
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(1)
            await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            engine.fails = True
            engine.resumed.clear()
            with pytest.raises(UpdateFailed, match="half of the workers"):
                await agent.remove_adapter(NAME)
            await engine.resumed.wait()
            assert engine.serves == 1.0

    run(scenario())


@pytest.mark.usefixtures("elsewhere")
def test_ranks_in_lockstep_keep_the_adapter_that_one_of_them_can_not_load() -> None:
    """All of its DP group go back to the one before, and a lone engine has the new one. The next
    one reaches all of them again, over a communicator of all three. (With chunks yet to be sent in
    it, the update of all would end.)"""
    zero, one, alone = ranks = Collects(0, 2), Collects(1, 2), Collects()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(zero, broker=broker, name="moe-0", dp_group="moe"),
            Sidecar(one, broker=broker, name="moe-1", dp_group="moe"),
            Sidecar(alone, broker=broker, name="alone"),
            TrainerAgent(broker, name="trainer", backend="gloo") as agent,
        ):
            await agent.wait_for_engines(3)
            await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            assert [(each.serves, each.chunks) for each in ranks] == [(1.0, 1)] * 3
            one.fails = True
            zero.resumed.clear()
            one.resumed.clear()
            await agent.update_adapter(NAME, tensors(2.0), config=CONFIG)
            await zero.resumed.wait()
            await one.resumed.wait()
            assert [each.serves for each in ranks] == [1.0, 1.0, 2.0]
            one.fails = False
            version = await agent.update_adapter(NAME, tensors(3.0), config=CONFIG)
            assert [each.serves for each in ranks] == [3.0] * 3
            views = await engines_of(agent)
            assert {(view.version, view.phase) for view in views.values()} == {(version, "running")}

    run(scenario())


def test_an_engine_that_joins_gets_the_next_version() -> None:
    """The transport that the others have open was made without it."""
    first, second = Collects(), Collects()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(first, broker=broker, name="e0"),
            TrainerAgent(broker, name="trainer", backend="gloo") as agent,
        ):
            await agent.wait_for_engines(1)
            await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            async with Sidecar(second, broker=broker, name="e1"):
                await agent.wait_for_engines(2)
                await agent.update_adapter(NAME, tensors(2.0), config=CONFIG)
                assert (first.serves, second.serves) == (2.0, 2.0)

    run(scenario())


def test_an_engine_that_shared_memory_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with what would reach it, before anything happens."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(Collects(), broker=broker, name="elsewhere"),
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(1)
            opened = ShmReceiver.open

            def from_another_host(receiver: ShmReceiver, params: bytes, place: Any) -> None:
                with monkeypatch.context() as patch:
                    patch.setattr("bus._weight_transfer.shm.SHM_FOLDER", "/nonexistent")
                    opened(receiver, params, place)

            monkeypatch.setattr(ShmReceiver, "open", from_another_host)
            with pytest.raises(Refused, match="gloo and nccl reach engines on other") as refused:
                await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            assert refused.value.code is NackCode.TRANSFER_FAILED
            assert refused.value.nack.peer == "elsewhere"
            assert refused.value.nack.step == "transfer_init"

    run(scenario())


def test_memory_that_is_not_packed_is_no_matter_of_an_adapter() -> None:
    """A trainer that lends its weights packs its adapters, wherever their tensors are."""
    engine = Collects()

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(engine, broker=broker, name="e0"),
            TrainerAgent(broker, name="trainer", packed=False) as agent,
        ):
            await agent.wait_for_engines(1)
            weights = {"w": torch.zeros(4)}
            for value in (1.0, 2.0):
                await agent.update_adapter(NAME, tensors(value), config=CONFIG)
                assert agent._transport.sender.packed
                assert engine.serves == value
                await agent.update_weights(weights)
                assert not agent._transport.sender.packed

    run(scenario())


def test_what_is_no_adapter_never_reaches_the_bus() -> None:
    async def scenario() -> None:
        async with a_broker() as (_, broker):
            async with TrainerAgent(broker, name="trainer") as agent:
                with pytest.raises(UsageError, match="adapter='a/b'"):
                    await agent.update_adapter("a/b", tensors(1.0), config=CONFIG)
                with pytest.raises(UsageError, match="r must be given"):
                    await agent.update_adapter(NAME, tensors(1.0), config={**CONFIG, "r": None})
            several = TrainerAgent(broker, name="rank0", ranks=2)
            with pytest.raises(UsageError, match="2 ranks"):
                await several.update_adapter(NAME, tensors(1.0), config=CONFIG)

    run(scenario())
