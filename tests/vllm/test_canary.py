"""The canary over the bus on two real engines: one loads what it gets wrongly, and is named.

Its prompts are scored by Hugging Face transformers, in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import Refused
from sidecar import Sidecar
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support.broker import a_broker
from tests.support.checkpoints import HEAD_DIM, make_checkpoint, perturbed
from tests.vllm._twist import HEAD_ROWS, TWIST
from tests.vllm._vllm import (
    MAX_POSITIONS,
    PROMPT,
    Oracle,
    async_llm,
    boot_environment,
    engine_args,
    generate,
    require_vllm,
)
from trainer_agent import Canary, TrainerAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LIMIT_S = 600.0
TOKENS = 12
PROBES = (PROMPT, (40, 3, 18))


@contextlib.asynccontextmanager
async def two_engines(folder: Path) -> AsyncIterator[list[Any]]:
    """Of one checkpoint; they boot beside each other."""
    booted = async_llm(boot_environment(folder), engine_args(folder / "model"))
    other = async_llm(boot_environment(folder), engine_args(folder / "model"))
    async with booted as first, other as second:
        yield [first, second]


def scored(oracle: Oracle, weights: Mapping[str, Tensor]) -> Callable[[Any, Any], list[float]]:
    """By transformers, teacher-forced."""

    def score(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
        return oracle.score(weights, prompt, tokens)

    return score


def test_an_engine_with_swapped_rows_is_named_and_quarantined(tmp_path: Path) -> None:
    """Each byte has arrived. It serves nobody, and queues nobody; the other one serves, and the
    next whole update frees it. A pause that keeps requests is refused beforehand."""
    assert HEAD_ROWS == HEAD_DIM
    checkpoint = make_checkpoint(tmp_path / "model", seed=1, max_positions=MAX_POSITIONS)
    new, newer = perturbed(checkpoint.weights, 5), perturbed(checkpoint.weights, 6)
    oracle = Oracle(checkpoint.folder)

    async def tokens(llm: Any, name: str) -> Any:
        return (await generate(llm, name, TOKENS)).token_ids

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            llms = await stack.enter_async_context(two_engines(tmp_path))
            _, broker = await stack.enter_async_context(a_broker())
            for index, llm in enumerate(llms):
                engine = VllmEngine(llm)
                sidecar = Sidecar(engine, broker=broker, group="policy", name=f"e{index}")
                await stack.enter_async_context(sidecar)
            agent = await stack.enter_async_context(TrainerAgent(broker, verify="full"))
            await agent.wait_for_engines(2)
            canary = Canary(PROBES, score=scored(oracle, new), tolerance=0.01)
            with pytest.raises(Refused, match=r'e0, e1.*mode="abort"'):
                await agent.update_weights(new, canary=canary)
            await llms[1].collective_rpc(TWIST, kwargs={"on": True})
            assert await agent.update_weights(new, mode="abort", canary=canary) == 1
            assert agent.last_update is not None
            assert agent.last_update.verified == "full"
            (differs,) = agent.last_update.differing
            assert (agent.last_update.excluded, differs.engine) == (("e1",), "e1")
            assert differs.expected.startswith("log-probability")
            (group,) = (await agent.status()).groups
            assert [(out.engine, out.state) for out in group.out] == [("e1", "quarantined")]
            assert list(await tokens(llms[0], "r1")) == oracle.greedy(new, TOKENS)
            ended = await generate(llms[1], "r2", TOKENS)
            assert (list(ended.token_ids), ended.finish_reason) == ([], "abort")
            await llms[1].collective_rpc(TWIST, kwargs={"on": False})
            canary = Canary(PROBES, score=scored(oracle, newer), tolerance=0.01)
            assert await agent.update_weights(newer, mode="abort", canary=canary) == 2
            assert agent.last_update.differing == ()
            for index, llm in enumerate(llms):
                expected = oracle.greedy(newer, TOKENS)
                assert list(await tokens(llm, f"s{index}")) == expected

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    gc.collect()
