"""Untrained Qwen3 networks for the demo and the benches: their sizes, weights and checkpoints.

:class:`Network` is the embedded engine's own network. Its tensors have the names and shapes of a
checkpoint. The demo trains transformers' network instead (:mod:`lab.demo.policy`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from sidecar._embedded.qwen3 import Qwen3, Qwen3Config, attend_whole, rope_of

if TYPE_CHECKING:
    from pathlib import Path


class PolicyConfig(Qwen3Config, frozen=True, kw_only=True):
    """The sizes of a network, by default the demo's: lengths in tokens, widths in elements.

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


class Network(Qwen3):
    """A network that computes whole sequences, without a KV cache.

    Args:
        config: the network's sizes.
        seed: determines the initial weights.
    """

    config: PolicyConfig

    def __init__(self, config: PolicyConfig, seed: int = 0) -> None:
        super().__init__(config)
        draw_weights(self, config, seed)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits (batch, time, vocab) for token ids (batch, time), padded on the right.

        Logits at padded positions are meaningless.
        """
        rope = rope_of(torch.arange(ids.shape[1]), self.config)
        return cast("Tensor", self.lm_head(self.model(ids, rope, attend_whole)))


def draw_weights(network: torch.nn.Module, config: PolicyConfig, seed: int) -> None:
    """Draws all matrices of a network; those of the layers with standard deviation 1/sqrt(fan-in).

    Args:
        network: a Qwen3 network with the parameter names of transformers. Its norms stay 1.
        config: has the standard deviations of embedding and output layer.
        seed: determines the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if name.endswith("norm.weight"):
            continue
        std = float(weight.shape[-1]) ** -0.5
        if name == "lm_head.weight":
            std = config.head_std
        elif name == "model.embed_tokens.weight":
            std = config.embed_std
        with torch.no_grad():
            weight.normal_(0.0, std, generator=generator)


def write_config(config: PolicyConfig, folder: Path) -> None:
    """Writes ``config.json`` alone, for engines that draw random weights themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")


def save_network(network: Network, folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors`` (float32) into ``folder``."""
    write_config(network.config, folder)
    tensors = {name: value.detach().contiguous() for name, value in network.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
