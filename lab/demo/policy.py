"""The demo's policy: the Qwen3 network of transformers, with random weights.

The embedded engine has an implementation of its own, so two implementations check each other.
``python -m lab.demo.policy FOLDER EXPERTS`` writes a checkpoint of an untrained policy; with 0
experts it is dense.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from lab.network import PolicyConfig, draw_weights

if TYPE_CHECKING:
    from torch import Tensor

Policy: TypeAlias = PreTrainedModel


def make_policy(config: PolicyConfig, seed: int = 0) -> Policy:
    """Returns ``Qwen3ForCausalLM``, or with experts ``Qwen3MoeForCausalLM``, in float32.

    Args:
        config: the network's sizes.
        seed: determines the initial weights.
    """
    policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_hf()))
    draw_weights(policy, config, seed)
    return policy


def copy_of(policy: Policy) -> dict[str, Tensor]:
    """Returns a copy of the policy's state dict."""
    return {name: each.detach().clone() for name, each in policy.state_dict().items()}


def save_checkpoint(policy: Policy, folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors`` (float32) into ``folder``."""
    disable_progress_bar()
    policy.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a checkpoint of an untrained policy.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("experts", type=int, help="per layer; 0: a dense model")
    asked = parser.parse_args()
    save_checkpoint(make_policy(PolicyConfig(experts=asked.experts)), asked.folder)
