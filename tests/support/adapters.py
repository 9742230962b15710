"""LoRA adapters of the small checkpoints, and the weights that a model has with one of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MadeAdapter:
    """Tensors by PEFT's names, PEFT's config, and a model's weights with it merged in."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    merged: dict[str, Tensor]

    def save(self, folder: Path) -> Path:
        """As PEFT saves one; returns the folder."""
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "adapter_model.safetensors")
        return folder


def make_adapter(
    weights: Mapping[str, Tensor], seed: int, *, rank: int = 4, targets: tuple[str, ...] = ALL
) -> MadeAdapter:
    """A random one, strong enough to change greedy tokens; its scale is 2."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    merged = dict(weights)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets:
            continue
        first = torch.randn((rank, weight.shape[1]), generator=generator) / weight.shape[1] ** 0.5
        second = torch.randn((weight.shape[0], rank), generator=generator) * 0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = first
        tensors[f"base_model.model.{module}.lora_B.weight"] = second
        merged[name] = weight + 2.0 * (second @ first)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    return MadeAdapter(tensors, config, merged)
