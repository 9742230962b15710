"""Untrained networks for benches, and their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from lab.network import Network, PolicyConfig, save_network

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("experts", [0, 4])
def test_transformers_loads_a_saved_network(experts: int, tmp_path: Path) -> None:
    """Every name is matched, and logits are equal."""
    network = Network(PolicyConfig(experts=experts, head_std=0.2), seed=3)
    save_network(network, tmp_path)
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(16, (4, 40))
    with torch.no_grad():
        torch.testing.assert_close(network(ids), other(ids).logits, atol=1e-4, rtol=0)


def test_padding_changes_no_real_logit() -> None:
    """Padding on the right leaves the logits of real places as they were."""
    network = Network(PolicyConfig(), seed=1)
    ids = torch.randint(4, 12, (2, 9))
    with torch.no_grad():
        padded = network(torch.cat((ids, torch.zeros(2, 3, dtype=torch.long)), 1))
        torch.testing.assert_close(padded[:, :9], network(ids), atol=1e-5, rtol=0)
    assert padded.isfinite().all()
