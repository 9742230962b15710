"""Training side of the demo policy: a small Qwen3 decoder written directly in torch.

Parameter names and arithmetic follow Hugging Face's ``Qwen3ForCausalLM`` (with experts:
``Qwen3MoeForCausalLM``), so one state dict serves this module, ``transformers``, vLLM and
any engine that reads that layout.

``python -m trainer_agent.demo.policy FOLDER EXPERTS`` writes a checkpoint of an untrained policy;
with 0 experts it is dense.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class PolicyConfig:
    """Sizes of the network; lengths in tokens, widths in float32 elements.

    The low ``rope_theta`` gives most rotary pairs a wavelength shorter than the few dozen
    tokens of a sequence, which makes "look this many tokens back" quick to learn.
    ``embed_std`` and ``head_std`` are standard deviations of the initial draw. With
    ``experts``, each layer has so many feed-forward networks of width ``expert_size``, and a
    token goes through ``experts_per_token`` of them.
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
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    embed_std: float = 0.5
    head_std: float = 0.02
    experts: int = 0
    experts_per_token: int = 2
    expert_size: int = 64

    def to_hf(self) -> dict[str, object]:
        """Return the ``config.json`` content that makes HF and vLLM build this network."""
        mixture: dict[str, object] = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "layer_types": ["full_attention"] * self.num_layers,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "pad_token_id": self.pad_id,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "dtype": "float32",
            **(mixture if self.experts else {}),
        }


class RmsNorm(nn.Module):
    """Scale the last axis to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with per-head query and key norms and rotary positions."""

    def __init__(self, cfg: PolicyConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        query, kv = self.heads * self.dim, self.kv_heads * self.dim
        self.q_proj = nn.Linear(cfg.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(query, cfg.hidden_size, bias=False)
        self.q_norm = RmsNorm(cfg.head_dim, cfg.rms_eps)
        self.k_norm = RmsNorm(cfg.head_dim, cfg.rms_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """Map (batch, time, hidden) to the same shape; ``bias`` None means plain causal."""
        batch, time, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, time, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, time, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, time, self.kv_heads, self.dim).transpose(1, 2)
        share = self.heads // self.kv_heads
        k = _rotate(k, rope).repeat_interleave(share, dim=1)
        v = v.repeat_interleave(share, dim=1)
        out = functional.scaled_dot_product_attention(
            _rotate(q, rope), k, v, attn_mask=bias, is_causal=bias is None
        )
        return cast("Tensor", self.o_proj(out.transpose(1, 2).reshape(batch, time, -1)))


class Mlp(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class Experts(nn.Module):
    """Some of several feed-forward blocks for each token, weighted by its preference."""

    def __init__(self, cfg: PolicyConfig) -> None:
        super().__init__()
        self.chosen = cfg.experts_per_token
        self.gate = nn.Linear(cfg.hidden_size, cfg.experts, bias=False)
        self.experts = nn.ModuleList(
            [Mlp(cfg.hidden_size, cfg.expert_size) for _ in range(cfg.experts)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Every block computes every token, and what was not chosen counts nothing: with
        blocks as small as these that is quicker than to sort tokens."""
        preference = torch.softmax(self.gate(x), dim=-1)
        share, chosen = torch.topk(preference, self.chosen, dim=-1)
        share = share / share.sum(dim=-1, keepdim=True)
        weight = torch.zeros_like(preference).scatter(-1, chosen, share)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            out = out + weight[..., index, None] * expert(x)
        return out


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, cfg: PolicyConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(cfg.hidden_size, cfg.rms_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RmsNorm(cfg.hidden_size, cfg.rms_eps)
        self.mlp = Experts(cfg) if cfg.experts else Mlp(cfg.hidden_size, cfg.intermediate_size)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, bias)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    """Embedding, decoder layers and final norm: HF's ``model.`` prefix."""

    def __init__(self, cfg: PolicyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList([Block(cfg) for _ in range(cfg.num_layers)])
        self.norm = RmsNorm(cfg.hidden_size, cfg.rms_eps)


class Policy(nn.Module):
    """Causal language model whose ``state_dict`` is a valid Qwen3 checkpoint."""

    def __init__(self, cfg: PolicyConfig, seed: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Trunk(cfg)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Draw every matrix: 1/sqrt(fan-in) inside, a near-uniform output distribution."""
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                continue
            std = float(weight.shape[1]) ** -0.5
            if name == "lm_head.weight":
                std = self.cfg.head_std
            elif name == "model.embed_tokens.weight":
                std = self.cfg.embed_std
            with torch.no_grad():
                weight.normal_(0.0, std, generator=generator)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits (batch, time, vocab) for token ids (batch, time).

        ``mask`` (batch, time) is true at real tokens; padding may stand on either side and
        logits at padded places mean nothing. Without a mask every place counts, which is
        also exact, and cheaper, for the real places of batches padded on the right.
        """
        time = ids.shape[1]
        if mask is None:
            bias, places = None, torch.arange(time).expand(1, time)
        else:
            seen = mask.bool()
            places = (seen.long().cumsum(1) - 1).clamp(min=0)
            causal = torch.ones(time, time, dtype=torch.bool).tril()
            # A padded query would see nothing and turn to NaN, so it may see itself.
            alone = torch.eye(time, dtype=torch.bool)
            bias = ((causal & seen[:, None, :]) | alone)[:, None]
        rope = _rope(places, self.cfg)
        x: Tensor = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, rope, bias)
        return cast("Tensor", self.lm_head(self.model.norm(x)))


def _rope(places: Tensor, cfg: PolicyConfig) -> tuple[Tensor, Tensor]:
    """Return rotary cosines and sines (batch, 1, time, head_dim) for positions in tokens."""
    speed = cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim)
    angle = (places[:, None, :, None].float() * speed).repeat(1, 1, 1, 2)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the two halves of the last axis against each other by the rotary angles."""
    first, second = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat((-second, first), dim=-1) * rope[1]


def copy_of(policy: Policy) -> dict[str, Tensor]:
    """Its weights, as they are now."""
    return {name: each.detach().clone() for name, each in policy.state_dict().items()}


def save_checkpoint(policy: Policy, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` (float32) into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(policy.cfg.to_hf(), indent=2) + "\n")
    tensors = {name: value.detach().contiguous() for name, value in policy.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    folder, experts = sys.argv[1:]
    save_checkpoint(Policy(PolicyConfig(experts=int(experts))), Path(folder))
