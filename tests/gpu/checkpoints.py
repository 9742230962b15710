"""Random Qwen3 checkpoints of one shape, for engines to load and trainers to send."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def moe_config(*, small: bool, vocab_size: int = 32_768) -> Any:
    """1.2 billion parameters and 32 experts in bf16; or tiny, in float32."""
    import transformers  # noqa: PLC0415 - slow

    return transformers.Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64 if small else 1024,
        intermediate_size=128 if small else 2048,
        num_hidden_layers=2 if small else 12,
        num_attention_heads=2 if small else 16,
        num_key_value_heads=1 if small else 4,
        head_dim=64,
        num_experts=4 if small else 32,
        num_experts_per_tok=2,
        moe_intermediate_size=64 if small else 1024,
        **_common(small=small),
    )


def dense_config(*, small: bool) -> Any:
    """Half a billion parameters in bf16; or tiny, in float32."""
    import transformers  # noqa: PLC0415 - slow

    return transformers.Qwen3Config(
        vocab_size=256 if small else 32_768,
        hidden_size=64 if small else 1024,
        intermediate_size=128 if small else 3072,
        num_hidden_layers=2 if small else 28,
        num_attention_heads=4 if small else 16,
        num_key_value_heads=2 if small else 8,
        head_dim=32 if small else 128,
        **_common(small=small),
    )


def make(config: Any, folder: Path, seed: int, device: str) -> Any:
    """The model, made on ``device``; also saved in ``folder``."""
    import torch  # noqa: PLC0415 - slow
    import transformers  # noqa: PLC0415 - slower

    torch.manual_seed(seed)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    made.save_pretrained(folder)
    return made


def _common(*, small: bool) -> dict[str, Any]:
    return {
        "max_position_embeddings": 4096,
        "initializer_range": 0.3 if small else 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32" if small else "bfloat16",
    }


if __name__ == "__main__":
    target, where, *shapes = sys.argv[1:]
    tiny = where == "cpu"
    for number, name in enumerate(("a", "b")):
        if "dense" in shapes:
            make(dense_config(small=tiny), Path(target) / name, 7 + number, where)
        if "moe" in shapes:
            make(moe_config(small=tiny), Path(target) / f"moe-{name}", 7 + number, where)
