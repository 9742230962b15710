"""vLLM's trainer engines with the bus as their control plane: wavebus's own, by vLLM's factory.

One example boots a real engine; the rest needs vLLM's classes, and has embedded engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus._weight_transfer.registry import register_sender
from bus._weight_transfer.shm import ShmSender
from bus.errors import ManifestRefused, Refused, WavebusError
from bus.messages import NackCode
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.procs import ROOT
from tests.support.serving import an_engine, assert_serve
from tests.vllm._vllm import boot_environment, require_vllm
from trainer_agent import SyncTrainerAgent
from trainer_agent._weights.source import PairSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint

require_vllm()
# vLLM's own imports warn of what they deprecate.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

CHUNK_BYTES = 1 << 14
LIMIT_S = 600.0


@pytest.mark.ci
def test_the_example_runs(tmp_path: Path) -> None:
    """As its first lines say; it checks by itself what the engine then generates, and that half
    of a fused tensor is refused."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "vllm_trainer_engine.py")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, **boot_environment(tmp_path)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "refused, and the engine serves on: manifest_refused" in ended.stdout
    assert "version 2: " in ended.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


@contextlib.asynccontextmanager
async def a_bench(**options: Any) -> AsyncIterator[tuple[str, Trainer]]:
    async with a_broker() as (_, broker):
        agent = SyncTrainerAgent(broker, chunk_bytes=CHUNK_BYTES, **options)
        await asyncio.to_thread(agent.connect)
        try:
            yield broker, Trainer(agent)
        finally:
            await asyncio.to_thread(agent.close)


class Trainer:
    """What a user writes, from a coroutine."""

    def __init__(self, agent: SyncTrainerAgent) -> None:
        self.agent = agent
        self.engine: Any = None

    async def init(self, weights: Any) -> None:
        await asyncio.to_thread(self._init, weights)

    def _init(self, weights: Any) -> None:
        init_info = self.agent.init_info()
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

        self.engine = WeightTransferTrainerFactory.trainer_init(
            init_info, client=self.agent.client(), source=self.agent.source(weights)
        )

    async def wait_for_engines(self, count: int) -> None:
        await asyncio.to_thread(self.agent.wait_for_engines, count)

    async def send_weights(self) -> int:
        await asyncio.to_thread(self.engine.send_weights)
        assert self.agent.last_update is not None
        return self.agent.last_update.version


@pytest.fixture
def run() -> Callable[..., None]:
    def bounded(scenario: Any) -> None:
        asyncio.run(asyncio.wait_for(scenario, LIMIT_S))

    return bounded


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_engines_come_and_go(
    checkpoint: Checkpoint, backend: str, run: Callable[..., None]
) -> None:
    """The rendezvous is made anew where it must be, by the trainer engine itself."""
    weights = perturbed(checkpoint.weights, 1)
    own = perturbed(checkpoint.weights, 2)

    async def scenario() -> None:
        async with (
            a_bench(backend=backend) as (broker, trainer),
            an_engine(checkpoint, broker, "e0") as first,
        ):
            await trainer.wait_for_engines(1)
            await trainer.init(weights)
            assert await trainer.send_weights() == 1
            await assert_serve(checkpoint, weights, 1, first)
            async with an_engine(checkpoint, broker, "e1") as second:
                await trainer.wait_for_engines(2)
                assert await trainer.send_weights() == 2
                await assert_serve(checkpoint, weights, 2, first, second)
                assert await asyncio.to_thread(trainer.agent.update_weights, own) == 3
                await assert_serve(checkpoint, own, 3, first, second)
            assert await trainer.send_weights() == 4
            await assert_serve(checkpoint, weights, 4, first)
            report = trainer.agent.last_update
            assert report is not None
            assert report.verified == "sample"
            assert report.chunks > 2
            trainer.engine.shutdown()

    run(scenario())


class Fails(PairSource):
    """Breaks off in the middle, once."""

    failed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(super().__iter__()):
            if index == len(self._pairs) // 2 and not self.failed:
                self.failed = True
                raise ValueError("the disk is gone")
            yield pair


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_fails_leaves_the_way_free(
    checkpoint: Checkpoint, backend: str, run: Callable[..., None]
) -> None:
    """A refusal, and a source that breaks off; larger tensors get more room."""
    weights = perturbed(checkpoint.weights, 3)

    async def scenario() -> None:
        async with (
            a_bench(backend=backend) as (broker, trainer),
            an_engine(checkpoint, broker, "e0") as engine,
        ):
            await trainer.wait_for_engines(1)
            small = {"model.norm.weight": weights["model.norm.weight"]}
            pairs = dict(small)
            await trainer.init(pairs)
            with pytest.raises(ManifestRefused, match="missing"):
                await trainer.send_weights()
            await assert_serve(checkpoint, checkpoint.weights, 0, engine)
            pairs |= weights
            version = await trainer.send_weights()
            await assert_serve(checkpoint, weights, version, engine)

            await trainer.init(Fails(weights))
            with pytest.raises(ValueError, match="the disk is gone"):
                await trainer.send_weights()
            version = await trainer.send_weights()
            await assert_serve(checkpoint, weights, version, engine)

    run(scenario())


def test_an_engine_without_the_backend_is_named(
    checkpoint: Checkpoint, run: Callable[..., None]
) -> None:
    """When the trainer engine is made."""
    register_sender("pigeons", ShmSender)

    async def scenario() -> None:
        async with (
            a_bench(backend="pigeons") as (broker, trainer),
            an_engine(checkpoint, broker, "e0"),
        ):
            await trainer.wait_for_engines(1)
            with pytest.raises(Refused, match="no transfer backend 'pigeons'") as refused:
                await trainer.init(checkpoint.weights)
            assert (refused.value.code, refused.value.nack.peer) == (NackCode.BACKEND_MISSING, "e0")
            with pytest.raises(WavebusError, match="source=None"):
                await asyncio.to_thread(_without_source, trainer.agent)

    run(scenario())


def _without_source(agent: SyncTrainerAgent) -> None:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    WeightTransferTrainerFactory.trainer_init(agent.init_info(), client=agent.client())


def test_client_and_source_are_what_vllm_asks_for(checkpoint: Checkpoint) -> None:
    """Its protocol is one that objects can be asked about."""
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient  # noqa: PLC0415

    from trainer_agent import TrainerAgent  # noqa: PLC0415

    agent = TrainerAgent("tcp://127.0.0.1:1")
    assert isinstance(agent.client(), VLLMWeightSyncClient)
    (meta,) = agent.source({"w": torch.zeros(2, 3)}).metadata()
    assert (meta.name, meta.dtype, meta.shape) == ("w", torch.float32, (2, 3))
