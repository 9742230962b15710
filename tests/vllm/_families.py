"""Model families that vLLM and transformers have in common, each as a tiny model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

POSITIONS: Final = 256
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """A model type of transformers.

    Attributes:
        model_type: as its configuration has it.
        sizes: beside :data:`SIZES`, by the names of its configuration; None leaves one out.
        staged: its updates can be staged.
        differs: booted from the same checkpoint, vLLM's tokens are not those of transformers.
        dtype: of the model and its checkpoint.
        architecture: as published checkpoints name it, where transformers has another name.
    """

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    staged: bool = True
    differs: bool = False
    dtype: str = "float32"
    architecture: str = ""

    def model(self, seed: int) -> Any:
        """Make one of it, its weights from a seed."""
        import torch  # noqa: PLC0415 - after require_vllm
        import transformers  # noqa: PLC0415

        left_out = {name for name, size in self.sizes.items() if size is None}
        sizes = {name: s for name, s in {**SIZES, **self.sizes}.items() if name not in left_out}
        config = transformers.AutoConfig.for_model(self.model_type, dtype=self.dtype, **sizes)
        dtype = getattr(torch, self.dtype)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        torch.manual_seed(seed)
        # Small embeddings: a head that is tied to large ones gives each token itself, whatever
        # the layers do. Norms and biases begin as ones and zeros, and each is as another.
        embeddings = {id(model.get_input_embeddings().weight), id(model.lm_head.weight)}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.normal_(std=0.1 if id(parameter) in embeddings else 0.3)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):  # by which experts are chosen
                    buffer.normal_()
        return model

    def save(self, model: Any, folder: Path) -> None:
        """Write its checkpoint."""
        model.save_pretrained(folder)
        if self.architecture:
            path = folder / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**config, "architectures": [self.architecture]}))


_EXPERTS: Final = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_LATENT: Final = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,  # with 64 positions, the one size that vLLM has a CPU kernel for
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "head_dim": 64,
}
_SHARED: Final = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

FAMILIES: Final = (
    Family("apertus", differs=True, dtype="bfloat16"),
    Family("arcee"),
    Family("bloom", {"n_layer": 2, "n_head": 2}, staged=False),
    Family("cohere"),
    Family("cohere2"),
    Family("deepseek_v2", {**_LATENT, "topk_method": "greedy"}, differs=True),
    Family("deepseek_v3", {**_LATENT, "topk_method": "noaux_tc"}, differs=True),
    Family("dots1", _SHARED),
    Family("ernie4_5"),
    Family("exaone4"),
    Family("falcon", {"head_dim": None}, staged=False),
    Family("gemma"),
    Family("gemma2"),
    Family("gemma3_text"),
    Family("glm"),
    Family("glm4"),
    Family("glm4_moe", _SHARED),
    Family("gpt2"),
    Family("gpt_bigcode"),
    Family("gpt_neox", differs=True),
    Family("gptj", {"rotary_dim": 16}),
    Family("granite"),
    Family("granitemoe", _EXPERTS),
    Family("helium"),
    Family("hunyuan_v1_dense"),
    Family("llama"),
    Family("mistral"),
    Family("mixtral", _EXPERTS),
    Family("nemotron"),
    Family("olmo"),
    Family("olmo2"),
    Family("olmo3"),
    Family("olmoe", _EXPERTS),
    Family("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    Family("phi"),
    Family("phi3"),
    Family(
        "phimoe",
        {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
        differs=True,
        architecture="PhiMoEForCausalLM",
    ),
    Family("qwen2"),
    Family("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    Family("qwen3"),
    Family("qwen3_moe", _EXPERTS),
    Family("seed_oss"),
    Family("smollm3"),
    Family("stablelm"),
    Family("starcoder2"),
)
