"""LoRA adapters over the bus: engines that only read them, and one that has none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import Refused, UpdateFailed, UsageError
from bus.lora import adapter_of
from bus.messages import NackCode
from sidecar import Sidecar
from sidecar.bench.programs.stub_engines import StubEngine
from sidecar.transfer import check_delivered, check_sums
from sidecar.transfer.lora import LoraReceiver
from tests.support.adapters import folders
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint
from tests.support.serving import an_engine, assert_serve
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bus.messages import EngineView, PauseMode, Target, Verify
    from bus.weight_transfer.allocation import RankAssignment
    from sidecar.engine import Chunk

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


class Reads(StubEngine):
    """Reads adapters from their folders, and has the last one in the place of a model."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.serves: float | None = None
        self.paused = False
        self.restored = asyncio.Event()
        self.resumed = asyncio.Event()
        self.opened: list[str] = []
        self._before: float | None = None
        self._receiver = LoraReceiver()
        self._staged: list[tuple[str, torch.Tensor]] = []

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:  # noqa: ARG002
        self.paused = True
        return 0

    async def resume(self) -> None:
        self.paused = False
        self.resumed.set()

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:
        self.opened.append(backend)
        if adapter_of(backend):
            self._receiver.open(params, place)
        return 1

    async def receive(self, chunk: Chunk) -> None:
        if adapter_of(chunk.backend):
            self._staged = self._receiver.receive(chunk.tensors, chunk.handle)
            check_delivered(chunk.backend, chunk.tensors, self._staged)

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        if self._staged:
            check_sums(seq, self._staged, verify, sums)
        self._before = self.serves
        if self._staged:
            self.serves = float(self._staged[0][1][0, 0])
        self._staged = []
        if self.fails:
            raise RuntimeError("no room for it")

    async def restore(self, target: Target = "model") -> None:  # noqa: ARG002
        self.serves = self._before
        self.restored.set()


def run(scenario: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, LIMIT_S))


async def engines_of(agent: TrainerAgent) -> dict[str, EngineView]:
    status = await agent.status()
    return {engine.name: engine for engine in status.groups[0].engines}


def test_every_engine_reads_the_adapter() -> None:
    """Between two updates of the model's weights, over the agent's own transport."""
    first, second = Reads(), Reads()

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
            assert folders() == []
            assert await agent.update_weights(weights) == 3
            assert first.opened == second.opened == ["shm", f"lora:{NAME}", "shm"]

    run(scenario())


def test_a_trainer_engine_is_to_be_made_anew() -> None:
    """Its transport went when engines opened the adapter's."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(Reads(), broker=broker, name="e0"),
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(1)
            await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            agent.source({"w": torch.zeros(4)})
            with pytest.raises(Refused, match="make the trainer engine anew") as refused:
                await asyncio.to_thread(agent.client().start_weight_update)
            assert refused.value.code is NackCode.TRANSFER_CLOSED

    run(scenario())


def test_an_engine_that_fails_to_load_serves_the_one_before() -> None:
    """The other one goes on with the new one. Nobody is mixed, and nobody quarantined; the next
    update brings both to the same."""
    good, bad = Reads(), Reads()

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
def test_a_trainer_that_is_killed_leaves_no_folder() -> None:
    """Both engines have loaded, and none has committed: they go back, and run. What it left on
    tmpfs goes with the next trainer's adapter."""
    engines = [Reads(), Reads()]

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
                stdout=subprocess.PIPE,
            )
            told, _ = await dies.communicate()
            assert dies.returncode == -9
            [left] = told.decode().split()
            for engine in engines:
                await engine.restored.wait()
                await engine.resumed.wait()
                assert (engine.serves, engine.paused) == (None, False)
            async with TrainerAgent(broker, name="next") as agent:
                await agent.wait_for_engines(2)
                await agent.update_adapter(NAME, tensors(4.0), config=CONFIG)
                assert left not in folders(dies.pid)
            assert [engine.serves for engine in engines] == [4.0, 4.0]

    run(scenario())


def test_an_embedded_engine_has_no_adapters(tmp_path: Path) -> None:
    """It is named before anything happens, and serves on."""
    checkpoint = make_checkpoint(tmp_path / "model", seed=3)

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(Reads(), broker=broker, name="reads"),
            an_engine(checkpoint, broker, "small") as engine,
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(2)
            with pytest.raises(UpdateFailed) as refused:
                await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            assert refused.value.code is NackCode.BACKEND_MISSING
            assert refused.value.nack.peer == "small"
            assert folders() == []
            await assert_serve(checkpoint, checkpoint.weights, 0, engine)
            assert await agent.update_weights(checkpoint.weights) == 1
            await assert_serve(checkpoint, checkpoint.weights, 1, engine)

    run(scenario())


def test_an_engine_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for the folder on a tmpfs of its own."""

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            Sidecar(Reads(), broker=broker, name="elsewhere"),
            TrainerAgent(broker, name="trainer") as agent,
        ):
            await agent.wait_for_engines(1)
            monkeypatch.setattr("sidecar.transfer.lora.SHM_FOLDER", "/nonexistent")
            with pytest.raises(Refused, match="run on one host") as refused:
                await agent.update_adapter(NAME, tensors(1.0), config=CONFIG)
            assert refused.value.nack.peer == "elsewhere"
            assert refused.value.nack.step == "transfer_init"
            assert folders() == []

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
