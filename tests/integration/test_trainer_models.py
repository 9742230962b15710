"""Trainers whose weights are not in the form that engines load: in another dtype, or fused."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from bus.errors import ManifestRefused
from sidecar import Sidecar
from sidecar.embedded import EmbeddedEngine
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.fsdp import train
from tests.support.serving import an_engine, assert_serve, greedy
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from pathlib import Path

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


def run(scenario: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, LIMIT_S)

    asyncio.run(bounded())


async def loaded_from(folder: Path, source: Path, weights: Mapping[str, Tensor]) -> list[int]:
    """Tokens of an engine that was booted from these weights in bfloat16, with that config."""
    write_cast(folder, source, weights)
    engine = EmbeddedEngine(folder, host=None)
    await engine.start()
    try:
        return (await greedy(engine))[0]
    finally:
        await engine.close()


def write_cast(folder: Path, source: Path, weights: Mapping[str, Tensor]) -> None:
    folder.mkdir()
    config = {**json.loads((source / "config.json").read_text()), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(cast, folder / "model.safetensors")


def test_a_float32_trainer_updates_a_bfloat16_engine(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """As if the engine had loaded the cast checkpoint. The refusal without it names the option."""
    new = perturbed(checkpoint.weights, 4)

    async def scenario() -> None:
        engine = EmbeddedEngine(checkpoint.folder, host=None, dtype="bfloat16")
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", chunk_bytes=1 << 15, verify="full") as agent,
            Sidecar(engine, broker=broker, group="policy", name="e0"),
        ):
            (view,) = await agent.wait_for_engines(1)
            assert view.dtype == "bfloat16"
            with pytest.raises(ManifestRefused, match=r'update_weights\(\.\.\., dtype="engine"\)'):
                await agent.update_weights(new)
            for how in ("paused", "staged"):
                version = await agent.update_weights(new, dtype="engine", how=how)
                served = await loaded_from(tmp_path / how, checkpoint.folder, new)
                assert await greedy(engine) == (served, version)
            assert agent.last_update is not None
            sent = sum(2 * tensor.numel() for tensor in new.values())
            assert agent.last_update.size_bytes == sent

    run(scenario())


@pytest.mark.ci
def test_two_ranks_in_float32_update_a_bfloat16_engine(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """FSDP2: gathered in the trainer's dtype on both ranks, cast by rank 0."""
    new = perturbed(checkpoint.weights, 5)

    async def scenario() -> None:
        engine = EmbeddedEngine(checkpoint.folder, host=None, dtype="bfloat16")
        async with (
            a_broker() as (_, broker),
            Sidecar(engine, broker=broker, group="policy", name="e0"),
        ):
            said = await train(
                tmp_path, [new], broker=broker, engines=1, backend="shm", dtype="engine"
            )
            assert said == [[{"gathered": len(new), "version": 1}]] * 2
            served = await loaded_from(tmp_path / "cast", checkpoint.folder, new)
            assert await greedy(engine) == (served, 1)

    run(scenario())


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), seed=8, experts=4)


def test_experts_that_transformers_fuses_are_sent_as_its_checkpoint_has_them(
    experts: Checkpoint,
) -> None:
    """A model, and its state dict with a configuration. Without one the refusal says what to do."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    new = perturbed(experts.weights, 6)
    other = perturbed(experts.weights, 7)

    def model(weights: Mapping[str, Tensor]) -> torch.nn.Module:
        config = transformers.AutoConfig.from_pretrained(experts.folder)
        loaded: torch.nn.Module = transformers.Qwen3MoeForCausalLM.from_pretrained(
            None, config=config, state_dict=dict(weights)
        )
        return loaded

    async def scenario() -> None:
        async with (
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", chunk_bytes=1 << 15) as agent,
            an_engine(experts, broker, "e0") as engine,
        ):
            await agent.wait_for_engines(1)
            trained = model(new)
            assert any(name.endswith("gate_up_proj") for name, _ in trained.named_parameters())
            with pytest.raises(ManifestRefused, match="its state dict with config="):
                await agent.update_weights(trained.state_dict())
            version = await agent.update_weights(trained)
            await assert_serve(experts, new, version, engine)
            trained = model(other)
            state = trained.state_dict()
            version = await agent.update_weights(state, config=trained.config)
            await assert_serve(experts, other, version, engine)

    run(scenario())


@pytest.mark.slow
def test_two_ranks_send_a_model_with_fused_experts(experts: Checkpoint, tmp_path: Path) -> None:
    """FSDP2 of transformers' model: whatever a piece of the checkpoint is made of is gathered."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    new = perturbed(experts.weights, 9)

    async def scenario() -> None:
        async with a_broker() as (_, broker), an_engine(experts, broker, "e0") as engine:
            said = await train(
                tmp_path, [new], broker=broker, engines=1, backend="shm", config=experts.folder
            )
            assert [rank[0]["version"] for rank in said] == [1, 1]
            await assert_serve(experts, new, 1, engine)

    run(scenario())
