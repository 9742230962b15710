"""A mixture of experts computes what Qwen3Moe computes, and is loaded like any weights."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import EngineError, UsageError
from sidecar._embedded.config import read_config
from sidecar._embedded.model import ModelRunner
from sidecar._embedded.qwen3 import Alone, Mixture
from sidecar._embedded.weights import load_folder, load_tensors
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.push import Push, manifest_of
from tests.unit.sidecar.embedded.harness import PROMPT, greedy, run, serving

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[5, 9, 77, 31, 12], [40, 3], [8, 8, 8, 100, 101, 102, 103, 104, 4]]


@pytest.mark.ci
@pytest.mark.parametrize(
    "change",
    [{}, {"norm_topk_prob": False}, {"num_experts_per_tok": 1}, {"mlp_only_layers": [0]}],
    ids=str,
)
def test_greedy_tokens_equal_those_of_transformers(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """Token for token in float32, however tokens choose their experts."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers, the oracle, is not installed"
    )
    make_checkpoint(tmp_path, seed=8, experts=6)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps(config))
    oracle = transformers.Qwen3MoeForCausalLM(
        transformers.AutoConfig.from_pretrained(tmp_path)
    ).eval()
    if "mlp_only_layers" in change:
        oracle.save_pretrained(tmp_path)  # of other tensors than the checkpoint made
    oracle = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path).eval()
    model = ModelRunner(read_config(tmp_path), slots=3, max_len=128)
    load_folder(model.expected, model.parameters, tmp_path)
    rows = [list(prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        logits = model.step(prompts=rows)
        for _ in range(40):
            for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
                row.append(token)
            logits = model.step([row[-1] for row in rows], [len(row) - 1 for row in rows])
        for prompt, row in zip(PROMPTS, rows, strict=True):
            expected = oracle(torch.tensor([row]), use_cache=False).logits[0].argmax(-1)
            assert row[len(prompt) :] == expected[len(prompt) - 1 : -1].tolist()


def test_the_tests_reference_computes_the_same(tmp_path: Path) -> None:
    """Which the tests of several ranks are measured by."""
    checkpoint = make_checkpoint(tmp_path, seed=8, experts=6)

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            (output,) = await engine.generate(PROMPT, greedy(40)).outputs()
            assert list(output.token_ids) == checkpoint.greedy(checkpoint.weights, PROMPT, 40)
            assert len(set(output.token_ids)) > 8, "it says little if one token repeats"

    run(scenario())


def test_a_prompt_may_begin_in_the_step_in_which_others_decode(tmp_path: Path) -> None:
    """One pass over the layers for both gives each what a pass of its own gives."""
    checkpoint = make_checkpoint(tmp_path, seed=8, experts=4)
    apart, together = (ModelRunner(read_config(tmp_path), slots=3, max_len=64) for _ in range(2))
    first, second = PROMPTS[:2]
    with torch.inference_mode():
        for model in (apart, together):
            load_tensors(model.parameters, checkpoint.weights.items())
            token = int(model.step(prompts=[first]).argmax())
        # Alone, the second prompt has the first one's slot.
        expected = torch.cat([apart.step([token], [len(first)]), apart.step(prompts=[second])])
        found = together.step([token], [len(first)], [second])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_no_token_is_a_batch_too(tmp_path: Path) -> None:
    """The dummy batch of a rank that has nothing to run."""
    make_checkpoint(tmp_path, seed=8, experts=4)
    config = read_config(tmp_path)
    ModelRunner(config, slots=1, max_len=64).dummy()
    mixture = Mixture(config, Alone())
    assert mixture(torch.empty(0, 64)).shape == (0, 64)


def test_an_update_over_the_bus_replaces_experts(tmp_path: Path) -> None:
    """Chunk by chunk, as any other weights."""
    checkpoint = make_checkpoint(tmp_path, seed=8, experts=4)
    new = perturbed(checkpoint.weights, 5)

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            await engine.pause("keep", clear_cache=True)
            await Push(engine, new, chunks=5).whole(1)
            await engine.resume()
            (output,) = await engine.generate(PROMPT, greedy(24)).outputs()
            assert list(output.token_ids) == checkpoint.greedy(new, PROMPT, 24)

    run(scenario())


class _Half(Alone):
    """A rank that has the last two of four experts."""

    def own(self, experts: int) -> range:
        return range(2, experts)


@pytest.mark.parametrize("exchange", [Alone(), _Half()], ids=["all", "half"])
def test_every_rank_checks_all_experts(tmp_path: Path, exchange: Alone) -> None:
    """What is missing or misshapen is refused by name, whoever holds that expert."""
    checkpoint = make_checkpoint(tmp_path, seed=8, experts=4)
    expected = ModelRunner(read_config(tmp_path), slots=1, max_len=8, exchange=exchange).expected
    whole = manifest_of(checkpoint.weights)
    expected.check(whole)
    for name in ("mlp.experts.0.up_proj", "mlp.experts.3.down_proj", "mlp.gate"):
        tensor = f"model.layers.1.{name}.weight"
        kept = {n: w for n, w in checkpoint.weights.items() if n != tensor}
        with pytest.raises(EngineError, match=name) as missing:
            expected.check(manifest_of(kept))
        assert missing.value.tensor == tensor
        place = whole.names.index(tensor)
        shapes = list(whole.shapes)
        shapes[place] = (1, *shapes[place][1:])
        with pytest.raises(EngineError, match="has shape"):
            expected.check(replace(whole, shapes=tuple(shapes)))


def test_a_rank_keeps_its_own_experts_alone(tmp_path: Path) -> None:
    """And everything else."""
    checkpoint = make_checkpoint(tmp_path, seed=8, experts=4)
    model = ModelRunner(read_config(tmp_path), slots=1, max_len=8, exchange=_Half())
    experts = {name for name in model.parameters if ".experts." in name}
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in experts} == {2, 3}
    load_tensors(model.parameters, checkpoint.weights.items())
    for name, weight in checkpoint.weights.items():
        own = ".experts." not in name or name in experts
        assert (name in model.parameters) == own
        if own:
            assert torch.equal(model.parameters[name], weight)


def test_what_the_model_can_not_be_is_refused(tmp_path: Path) -> None:
    """By file and field."""
    make_checkpoint(tmp_path, seed=8, experts=4)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for field, value in (
        ("model_type", "qwen4"),
        ("num_experts_per_tok", 5),
        ("moe_intermediate_size", None),
        ("norm_topk_prob", "yes"),
        ("mlp_only_layers", ["0"]),
    ):
        path.write_text(json.dumps(config | {field: value}))
        with pytest.raises(UsageError, match=rf"config\.json: .*{field}"):
            read_config(tmp_path)
