"""The decoder computes what Qwen3 computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from sidecar._embedded.config import read_config
from sidecar._embedded.model import ModelRunner
from sidecar._embedded.weights import load_folder
from tests.support.checkpoints import Checkpoint, make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[5, 9, 77, 31, 12], [40, 3], [8, 8, 8, 100, 101, 102, 103, 104, 4]]


def _model(checkpoint: Checkpoint, *, dtype: str = "auto", slots: int = 4) -> ModelRunner:
    model = ModelRunner(read_config(checkpoint.folder, dtype), slots=slots, max_len=128)
    load_folder(model.expected, model.parameters, checkpoint.folder)
    return model


@torch.inference_mode()
def _batched_greedy(model: ModelRunner, prompts: list[list[int]], count: int) -> list[list[int]]:
    """All prompts side by side, one slot each."""
    rows = [list(prompt) for prompt in prompts]
    logits = model.step(prompts=rows)
    for step in range(count):
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.append(token)
        if step < count - 1:
            logits = model.step([r[-1] for r in rows], [len(r) - 1 for r in rows])
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.parametrize("hidden", [64, pytest.param(128, marks=pytest.mark.ci)])
@pytest.mark.parametrize("tie", [False, True])
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, hidden: int, tie: bool) -> None:
    """Token for token in float32, with and without tied embeddings and shared KV heads."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers, the oracle, is not installed"
    )
    checkpoint = make_checkpoint(tmp_path, seed=8, hidden=hidden, tie=tie)
    oracle = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).eval()
    results = _batched_greedy(_model(checkpoint), PROMPTS, 48)
    for prompt, tokens in zip(PROMPTS, results, strict=True):
        sequence = list(prompt)
        with torch.inference_mode():
            for _ in range(48):
                logits = oracle(torch.tensor([sequence]), use_cache=False).logits
                sequence.append(int(logits[0, -1].argmax()))
        assert tokens == sequence[len(prompt) :]
        assert tokens == checkpoint.greedy(checkpoint.weights, prompt, 48)
        assert len(set(tokens)) > 8, "the oracle says little if one token repeats"


def test_company_changes_no_tokens(checkpoint: Checkpoint) -> None:
    """A padded prefill and a batch with longer ones give what each gets alone."""
    together = _batched_greedy(_model(checkpoint), PROMPTS, 32)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        assert tokens == checkpoint.greedy(checkpoint.weights, prompt, 32)


def test_logits_equal_the_reference_closely(checkpoint: Checkpoint) -> None:
    """Not only the largest one."""
    model = _model(checkpoint)
    with torch.inference_mode():
        logits = model.step(prompts=[PROMPTS[0]])
    expected, _ = checkpoint.forward(checkpoint.weights, PROMPTS[0])
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_a_moved_slot_goes_on_where_it_was(checkpoint: Checkpoint) -> None:
    """The cache of a slot can be copied to another, and continued there."""
    model = _model(checkpoint)
    prompt = PROMPTS[2]
    with torch.inference_mode():
        token = int(model.step(prompts=[*PROMPTS[:2], prompt])[2].argmax())
        model.kv.move(2, 0, len(prompt))
        logits = model.step([token], [len(prompt)])
    expected, _ = checkpoint.forward(checkpoint.weights, [*prompt, token])
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_a_cleared_cache_holds_nothing(checkpoint: Checkpoint) -> None:
    """Zeros everywhere, also where sequences have grown."""
    model = _model(checkpoint)
    _batched_greedy(model, PROMPTS, 8)
    assert model.kv.keys.count_nonzero() > 0
    model.kv.clear()
    assert model.kv.keys.count_nonzero() == 0
    assert model.kv.values.count_nonzero() == 0


def test_bfloat16_stays_close_to_float32(checkpoint: Checkpoint) -> None:
    """All parameters and the cache are in it; logits come out in float32."""
    model = _model(checkpoint, dtype="bfloat16")
    assert {p.dtype for p in model.parameters.values()} == {torch.bfloat16}
    with torch.inference_mode():
        logits = model.step(prompts=[PROMPTS[0]])
    assert logits.dtype == torch.float32
    expected, _ = checkpoint.forward(checkpoint.weights, PROMPTS[0])
    assert torch.nn.functional.cosine_similarity(logits[0], expected, dim=0) > 0.99
