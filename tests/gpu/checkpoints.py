"""Random Qwen3 checkpoints of one shape, for engines to load and trainers to send."""

from __future__ import annotations

import sys
from pathlib import Path


def make_moe(folder: Path, seed: int) -> None:
    """1.2 billion parameters in bf16, 32 experts, made on a GPU."""
    import torch  # noqa: PLC0415 - slow
    import transformers  # noqa: PLC0415 - slower

    config = transformers.Qwen3MoeConfig(
        vocab_size=32_768,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=2,
        moe_intermediate_size=1024,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    with torch.device("cuda"):
        made = transformers.Qwen3MoeForCausalLM(config)
    made.bfloat16().save_pretrained(folder)


def make(folder: Path, seed: int, device: str) -> None:
    """Half a billion parameters in bf16, made on a GPU; on the CPU a tiny one in float32."""
    import torch  # noqa: PLC0415 - slow
    import transformers  # noqa: PLC0415 - slower

    small = device == "cpu"
    config = transformers.Qwen3Config(
        vocab_size=256 if small else 32_768,
        hidden_size=64 if small else 1024,
        intermediate_size=128 if small else 3072,
        num_hidden_layers=2 if small else 28,
        num_attention_heads=4 if small else 16,
        num_key_value_heads=2 if small else 8,
        head_dim=32 if small else 128,
        max_position_embeddings=4096,
        initializer_range=0.3 if small else 0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32" if small else "bfloat16",
    )
    torch.manual_seed(seed)
    with torch.device(device):
        made = transformers.Qwen3ForCausalLM(config)
    made = made.float() if small else made.bfloat16()
    made.save_pretrained(folder)


if __name__ == "__main__":
    for number, name in enumerate(("a", "b")):
        if "dense" in sys.argv[3:]:
            make(Path(sys.argv[1]) / name, 7 + number, sys.argv[2])
        if "moe" in sys.argv[3:]:
            make_moe(Path(sys.argv[1]) / f"moe-{name}", 7 + number)
