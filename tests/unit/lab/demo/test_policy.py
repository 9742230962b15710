"""The training-side Qwen3 network and its checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lab.demo.policy import Policy, PolicyConfig, save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

WIDE = PolicyConfig(vocab_size=32, hidden_size=96, num_heads=4, num_kv_heads=2, num_layers=3)
MIXED = PolicyConfig(experts=4)


@pytest.mark.parametrize("cfg", [PolicyConfig(), WIDE, MIXED])
def test_transformers_computes_the_same_logits(cfg: PolicyConfig, tmp_path: Path) -> None:
    """A saved checkpoint loads into HF's Qwen3 with every name matched and equal logits."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    policy = Policy(cfg, seed=3)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1 + 0.3 * torch.randn(weight.shape))
    save_checkpoint(policy, tmp_path)
    kind = transformers.Qwen3MoeForCausalLM if cfg.experts else transformers.Qwen3ForCausalLM
    other, info = kind.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(cfg.vocab_size, (4, 40))
    with torch.no_grad():
        torch.testing.assert_close(policy(ids), other.eval()(ids).logits, atol=1e-4, rtol=0)


def test_padding_changes_no_real_logit() -> None:
    """Padding on the right leaves the logits of real places as they were."""
    policy = Policy(PolicyConfig(), seed=1)
    ids = torch.randint(4, 12, (2, 9))
    with torch.no_grad():
        padded = policy(torch.cat((ids, torch.zeros(2, 3, dtype=torch.long)), 1))
        torch.testing.assert_close(padded[:, :9], policy(ids), atol=1e-5, rtol=0)
    assert padded.isfinite().all()


def test_seed_decides_the_weights() -> None:
    """Equal seeds give equal weights and a near-uniform first policy; other seeds differ."""
    first, again, other = (Policy(PolicyConfig(), seed=s) for s in (5, 5, 6))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    with torch.no_grad():
        assert first(torch.arange(12)[None]).softmax(-1).max() < 0.15
