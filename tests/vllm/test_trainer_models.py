"""A float32 trainer with transformers' fused experts, and a bfloat16 engine that has them one by
one: after each update the engine's tokens are those of an engine that was booted from the
checkpoint that transformers saves in bfloat16."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pytest

from sidecar import Sidecar
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support.broker import a_broker
from tests.vllm._vllm import (
    async_llm,
    boot_environment,
    engine_args,
    generate,
    make_moe,
    require_vllm,
)
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TOKENS = 12
WAYS: tuple[Literal["paused", "staged"], ...] = ("paused", "staged")


@pytest.mark.slow
def test_a_float32_model_with_fused_experts_updates_a_bfloat16_engine(tmp_path: Path) -> None:
    import torch  # noqa: PLC0415 - after require_vllm
    import transformers  # noqa: PLC0415

    def model(seed: int, dtype: torch.dtype) -> Any:
        folder = make_moe(tmp_path / f"seed{seed}", seed)
        return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype)

    for seed in (1, 2, 3):
        model(seed, torch.bfloat16).save_pretrained(tmp_path / f"cast{seed}")
    expected = {seed: asyncio.run(booted(tmp_path, f"cast{seed}")) for seed in (2, 3)}

    async def updates() -> None:
        async with (
            async_llm(boot_environment(tmp_path), in_bfloat16(tmp_path / "cast1")) as llm,
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", verify="full") as agent,
            Sidecar(VllmEngine(llm), broker=broker, group="policy", name="e0"),
        ):
            await agent.wait_for_engines(1)
            for seed, how in zip((2, 3), WAYS, strict=True):
                trained = model(seed, torch.float32)
                assert any(name.endswith("gate_up_proj") for name, _ in trained.named_parameters())
                await agent.update_weights(trained, dtype="engine", how=how)
                assert await served(llm, how) == expected[seed]

    asyncio.run(updates())
    assert expected[2] != expected[3]


def in_bfloat16(folder: Path) -> dict[str, Any]:
    return engine_args(folder, dtype="bfloat16", max_model_len=256)


async def booted(folder: Path, name: str) -> list[int]:
    async with async_llm(boot_environment(folder), in_bfloat16(folder / name)) as llm:
        return await served(llm, name)


async def served(llm: Any, name: str) -> list[int]:
    last = await generate(llm, f"after-{name}", TOKENS)
    return list(last.token_ids)
