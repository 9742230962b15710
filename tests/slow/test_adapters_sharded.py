"""A LoRA adapter in an engine of two workers, each of which has a part of every module."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import TYPE_CHECKING

import pytest

from bus.errors import ManifestRefused
from sidecar import Sidecar
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support.adapters import make_adapter
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint
from tests.vllm._vllm import (
    MAX_POSITIONS,
    PROMPT,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    require_vllm,
)
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

NAME = "policy-lora"
LIMIT_S = 600.0
K_B = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"


def test_two_workers(tmp_path: Path) -> None:
    """Each takes its part of the same file; both refuse what fits neither. There are fewer heads
    of keys than workers, so that each has all of them."""
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)
    assert checkpoint.kv_heads == 1
    first, second = (make_adapter(checkpoint.weights, seed) for seed in (1, 2))
    falsified = {**second.tensors, K_B: second.tensors[K_B][:-1]}
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    args = engine_args(checkpoint.folder, tensor_parallel_size=2, **lora)

    async def scenario() -> None:
        names = itertools.count()
        async with (
            async_llm(boot_environment(tmp_path / "plugin"), args) as llm,
            a_broker() as (_, address),
        ):
            engine = VllmEngine(llm)
            async with (
                Sidecar(engine, broker=address, name="e0"),
                TrainerAgent(address, name="trainer", verify="full") as agent,
            ):
                await agent.wait_for_engines(1)
                for made in (first, second):
                    with pytest.raises(ManifestRefused, match="misshapen") as refused:
                        await agent.update_adapter(NAME, falsified, config=second.config)
                    assert refused.value.nack.tensor == K_B
                    await agent.update_adapter(NAME, made.tensors, config=made.config)
                    request = engine.lora_request(NAME)
                    last = await generate(llm, f"r{next(names)}", 24, lora=request)
                    assert list(last.token_ids) == checkpoint.greedy(made.merged, PROMPT, 24)
                    last = await generate(llm, f"r{next(names)}", 24)
                    assert list(last.token_ids) == checkpoint.greedy(checkpoint.weights, PROMPT, 24)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    gc.collect()  # vLLM leaves its sockets to the collector
