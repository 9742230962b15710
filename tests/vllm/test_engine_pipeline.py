"""Two pipeline parallel workers: each has half of the layers, and takes nothing of the others."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from sidecar._vllm.inprocess_engine import VllmEngine
from sidecar._vllm.plugin.operations import PERFORM
from sidecar._vllm.plugin.worker_rpc import SWAP
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.vllm._vllm import (
    MAX_POSITIONS,
    Oracle,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    paused_update,
    require_vllm,
    staged_update,
    ways,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

TOKENS = 24


def test_workers_of_a_pipeline_load_their_layers_and_swap_as_one(tmp_path: Path) -> None:
    """By vLLM's loader, by a plan, and staged; each worker plans for the layers that it has.

    Of a manifest that they don't know, as of these tensors in another order, the workers ask each
    other, by their core.
    """
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)
    oracle = Oracle(checkpoint.folder)

    async def scenario() -> None:
        arguments = engine_args(checkpoint.folder, pipeline_parallel_size=2)
        async with async_llm(boot_environment(tmp_path), arguments) as llm:
            engine = VllmEngine(llm)

            async def assert_serves(weights: Mapping[str, Tensor], name: str) -> None:
                last = await generate(llm, name, TOKENS)
                assert list(last.token_ids) == oracle.greedy(weights, TOKENS)

            try:
                assert (await engine.start()).workers == 2
                weights = dict(checkpoint.weights)
                await assert_serves(weights, "first")
                for version, way in ((1, "loader"), (2, "plan")):
                    weights = perturbed(weights, version)
                    await paused_update(engine, weights, version)
                    assert await ways(llm) == {way}
                    await assert_serves(weights, f"paused {version}")
                weights = dict(reversed(weights.items()))
                for version, asked in ((3, [PERFORM, SWAP]), (4, [SWAP])):
                    weights = perturbed(weights, version)
                    done = await staged_update(engine, weights, version, workers=2, backend="gloo")
                    assert done == asked
                    assert await ways(llm) == {"staged"}
                    await assert_serves(weights, f"staged {version}")
            finally:
                await engine.close()
        gc.collect()  # while warnings are no errors yet: vLLM leaves its sockets to the collector

    asyncio.run(scenario())
