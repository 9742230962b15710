"""The demo's policy is transformers' network; the engine's is another one, and they agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from bus._manifest import Manifest
from lab.demo.policy import make_policy, save_checkpoint
from lab.network import PolicyConfig
from sidecar._embedded.config import read_config
from sidecar._embedded.qwen3 import Qwen3, attend_whole, rope_of
from sidecar._embedded.weights import ExpectedWeights, load_folder, load_tensors
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.source import tensor_metas

if TYPE_CHECKING:
    from pathlib import Path

WIDE = PolicyConfig(vocab_size=32, hidden_size=96, num_heads=4, num_kv_heads=2, num_layers=3)
MIXED = PolicyConfig(experts=4)


def engine_logits(network: Qwen3, ids: torch.Tensor) -> torch.Tensor:
    rope = rope_of(torch.arange(ids.shape[1]), network.config)
    logits: torch.Tensor = network.lm_head(network.model(ids, rope, attend_whole))
    return logits


@pytest.mark.parametrize("config", [PolicyConfig(), WIDE, MIXED])
def test_the_engine_computes_the_same_logits(config: PolicyConfig, tmp_path: Path) -> None:
    """From the checkpoint with which the engine starts, and from the tensors of an update."""
    policy = make_policy(config, seed=3)
    save_checkpoint(policy, tmp_path)
    network = Qwen3(read_config(tmp_path))
    parameters = dict(network.named_parameters())
    expected = ExpectedWeights.of(network)
    ids = torch.randint(config.vocab_size, (4, 40))
    with torch.no_grad():
        load_folder(expected, parameters, tmp_path)
        torch.testing.assert_close(
            engine_logits(network, ids), policy(ids).logits, atol=1e-4, rtol=0
        )
        for weight in policy.parameters():
            weight.mul_(1 + 0.3 * torch.randn(weight.shape))
        assert not torch.allclose(engine_logits(network, ids), policy(ids).logits, atol=1e-2)
        source = as_source(policy)
        expected.check(Manifest.plan(tensor_metas(source.metadata()), chunk_bytes=1 << 20))
        load_tensors(parameters, source)
        torch.testing.assert_close(
            engine_logits(network, ids), policy(ids).logits, atol=1e-4, rtol=0
        )


def test_padding_changes_no_real_logit() -> None:
    """Padding on the right leaves the logits of real places as they were."""
    policy = make_policy(PolicyConfig(), seed=1)
    ids = torch.randint(4, 12, (2, 9))
    with torch.no_grad():
        padded = policy(torch.cat((ids, torch.zeros(2, 3, dtype=torch.long)), 1)).logits
        torch.testing.assert_close(padded[:, :9], policy(ids).logits, atol=1e-5, rtol=0)
    assert padded.isfinite().all()


def test_seed_decides_the_weights() -> None:
    """Equal seeds give equal weights and a near-uniform first policy; other seeds differ."""
    first, again, other = (make_policy(PolicyConfig(), seed=s) for s in (5, 5, 6))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    with torch.no_grad():
        assert first(torch.arange(12)[None]).logits.softmax(-1).max() < 0.15
