"""The demo's policy for training: the Qwen3 network that the embedded engine serves.

``python -m trainer_agent.demo.policy FOLDER EXPERTS`` writes a checkpoint of an untrained policy;
with 0 experts it is dense.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from sidecar.embedded.qwen3 import Qwen3, Qwen3Config, attend_whole, rope_of


class PolicyConfig(Qwen3Config, frozen=True, kw_only=True):
    """The sizes of the demo's network: lengths in tokens, widths in elements.

    ``rope_theta`` is low, so most rotary pairs have a wavelength shorter than a sequence (a few
    dozen tokens). The network then quickly learns to attend to a fixed distance.

    Attributes:
        embed_std: the standard deviation of the embedding's initial weights.
        head_std: the standard deviation of the output layer's initial weights.
    """

    vocab_size: int = 16
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    max_positions: int = 512
    rope_theta: float = 100.0
    rms_eps: float = 1e-6
    eos_id: int = 2
    experts_per_token: int = 2
    expert_size: int = 64
    norm_shares: bool = True
    embed_std: float = 0.5
    head_std: float = 0.02


class Policy(Qwen3):
    """The demo's network for training: computes whole sequences, without a KV cache.

    Args:
        config: the network's sizes.
        seed: determines the initial weights.
    """

    config: PolicyConfig

    def __init__(self, config: PolicyConfig, seed: int = 0) -> None:
        super().__init__(config)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Draws all matrices; those of the layers with standard deviation 1/sqrt(fan-in)."""
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                continue
            std = float(weight.shape[1]) ** -0.5
            if name == "lm_head.weight":
                std = self.config.head_std
            elif name == "model.embed_tokens.weight":
                std = self.config.embed_std
            with torch.no_grad():
                weight.normal_(0.0, std, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits (batch, time, vocab) for token ids (batch, time), padded on the right.

        Logits at padded positions are meaningless.
        """
        rope = rope_of(torch.arange(ids.shape[1]), self.config)
        return cast("Tensor", self.lm_head(self.model(ids, rope, attend_whole)))


def copy_of(policy: Policy) -> dict[str, Tensor]:
    """Returns a copy of the policy's weights."""
    return {name: each.detach().clone() for name, each in policy.state_dict().items()}


def write_config(config: PolicyConfig, folder: Path) -> None:
    """Writes ``config.json`` alone, for engines that draw random weights themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")


def save_checkpoint(policy: Policy, folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors`` (float32) into ``folder``."""
    write_config(policy.config, folder)
    tensors = {name: value.detach().contiguous() for name, value in policy.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a checkpoint of an untrained policy.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("experts", type=int, help="per layer; 0: a dense model")
    asked = parser.parse_args()
    save_checkpoint(Policy(PolicyConfig(experts=asked.experts)), asked.folder)
