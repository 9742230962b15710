"""Model families that vLLM and transformers have in common: two updates each, and the oracle.

Each is a tiny checkpoint with random weights (:mod:`_families`). The engine boots from one set of
weights; ``update_weights(model)`` brings the second in a pause, and the third staged where the
model can be staged (in a pause elsewhere). After each, greedy tokens and their log-probabilities
are those that transformers computes with the same weights. Where vLLM's differ from those before
any update, they are exactly those of an engine that was booted from the new weights' checkpoint.
docs/vllm.md has the list.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from sidecar import Sidecar
from sidecar._vllm.inprocess_engine import VllmEngine
from tests.support.broker import a_broker
from tests.vllm._families import FAMILIES, POSITIONS, Family
from tests.vllm._reader import READ_FLOAT32
from tests.vllm._vllm import PROMPT, async_llm, boot_environment, engine_args, require_vllm
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from trainer_agent._options import How

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TOKENS = 12
SEEDS = range(3)
# Of float32 computed in two ways: the most that was seen is 0.003 (gemma2).
TOLERANCE = 0.01
# With a loader that makes a parameter as it goes, and with weights among a layer's buffers.
ALWAYS = ("phi", "glm4_moe")
# Tokens and their log-probabilities.
Answer: TypeAlias = tuple[list[int], list[float]]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=[] if each.model_type in ALWAYS else pytest.mark.slow)
        for each in FAMILIES
    ],
    ids=lambda family: family.model_type,
)
def test_families_serve_what_two_updates_bring(family: Family, tmp_path: Path) -> None:
    models = [family.model(seed) for seed in SEEDS]
    for seed, model in enumerate(models):
        family.save(model, tmp_path / str(seed))
    expected = [_greedy(model) for model in models]
    if family.differs:
        booted = [asyncio.run(_booted(family, tmp_path, seed)) for seed in SEEDS]
        assert not _equal(booted, expected, TOLERANCE), "transformers is as good an oracle"
        expected = booted
    tokens = [answer[0] for answer in expected]
    assert len(set(map(tuple, tokens))) == len(SEEDS), "the weights make a difference"
    served = asyncio.run(_updated(family, tmp_path, models))
    assert _equal(served, expected, 0.0 if family.differs else TOLERANCE)


@pytest.mark.parametrize("how", ["paused", "staged"])
def test_a_cast_loses_nothing_that_the_engine_keeps(tmp_path: Path, how: How) -> None:
    """A trainer in float32, an engine in bfloat16, whose router has a bias in float32: by two
    updates, of which the second knows what the first was told."""
    engine = next(each for each in FAMILIES if each.model_type == "glm4_moe")
    engine = replace(engine, dtype="bfloat16")
    engine.save(engine.model(0), tmp_path / "0")
    trained = [replace(engine, dtype="float32").model(seed) for seed in (1, 2)]

    async def scenario() -> None:
        async with (
            async_llm(boot_environment(tmp_path), _args(engine, tmp_path, 0)) as llm,
            a_broker() as (_, broker),
            TrainerAgent(broker, group="policy", verify="full", keep_last=True) as agent,
            Sidecar(VllmEngine(llm), broker=broker, group="policy", name="e0"),
        ):
            await agent.wait_for_engines(1)
            for model in trained:
                await agent.update_weights(model, dtype="engine", how=how)
                (kept,) = await llm.collective_rpc(READ_FLOAT32)
                sent = dict(model.named_buffers())
                biases = {n: b for n, b in sent.items() if n.endswith("e_score_correction_bias")}
                assert biases
                for name, bias in biases.items():
                    assert kept[name] == bias.tolist()
                    assert bias.bfloat16().tolist() != bias.tolist()

    asyncio.run(scenario())


async def _updated(family: Family, folder: Path, models: list[Any]) -> list[Answer]:
    """What an engine serves after its boot, and after each update."""
    async with (
        async_llm(boot_environment(folder), _args(family, folder, 0)) as llm,
        a_broker() as (_, broker),
        TrainerAgent(broker, group="policy", verify="full") as agent,
        Sidecar(VllmEngine(llm), broker=broker, group="policy", name="e0"),
    ):
        await agent.wait_for_engines(1)
        answers = [await _served(llm)]
        await agent.update_weights(models[1], how="paused")
        answers.append(await _served(llm))
        await agent.update_weights(models[2], how="staged" if family.staged else "paused")
        answers.append(await _served(llm))
    return answers


async def _booted(family: Family, folder: Path, seed: int) -> Answer:
    """Of an engine that has loaded this checkpoint from its files."""
    async with async_llm(boot_environment(folder), _args(family, folder, seed)) as llm:
        return await _served(llm)


def _args(family: Family, folder: Path, seed: int) -> dict[str, Any]:
    return engine_args(folder / str(seed), max_model_len=POSITIONS, dtype=family.dtype)


async def _served(llm: Any) -> Answer:
    from vllm import SamplingParams  # noqa: PLC0415 - after require_vllm

    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, detokenize=False, ignore_eos=True, logprobs=0
    )
    asked = {"prompt_token_ids": PROMPT}
    async for output in llm.generate(asked, params, secrets.token_hex(4)):
        last = output.outputs[0]
    return list(last.token_ids), [next(iter(each.values())).logprob for each in last.logprobs]


def _greedy(model: Any) -> Answer:
    import torch  # noqa: PLC0415 - after require_vllm

    tokens, scores = list(PROMPT), []
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
            tokens.append(int(logits.argmax()))
            scores.append(float(logits.log_softmax(-1).max()))
    return tokens[len(PROMPT) :], scores


def _equal(some: list[Answer], others: list[Answer], tolerance: float) -> bool:
    return all(
        one[0] == other[0] and one[1] == pytest.approx(other[1], rel=0, abs=tolerance)
        for one, other in zip(some, others, strict=True)
    )


def test_the_page_lists_the_families_that_are_tested() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| ([^|]+) \| (staged|paused) \| (`[^|]+`) \|$", page, re.MULTILINE)
    listed = [
        (name, oracle, update)
        for oracle, update, names in rows
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert sorted(listed) == sorted(
        (
            each.model_type,
            "a booted engine" if each.differs else "transformers",
            "staged" if each.staged else "paused",
        )
        for each in FAMILIES
    )
