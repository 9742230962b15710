"""Small Qwen3 checkpoints, dense or with experts, with random weights, and the plainest
way to run them.

The reference below knows nothing of fused parameters, slots or batches: it computes
one sequence from Hugging Face tensors, in float32. Engines are measured against it,
and it against transformers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from safetensors.torch import save_file
from torch.nn import functional as F  # noqa: N812 - torch's own custom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

# Keys and values of each layer, [kv_heads, time, head_dim]; None before the first token.
Past: TypeAlias = "list[tuple[Tensor, Tensor] | None]"

FEED_FORWARD = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
ATTENTION_TENSORS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
NORM_TENSORS = ("input_layernorm.weight", "post_attention_layernorm.weight")
HEAD_DIM = 32
ROPE_THETA = 10000.0
RMS_EPS = 1e-6


@dataclass(frozen=True)
class Checkpoint:
    """A folder that an engine can load, its sizes, and all of its weights in float32."""

    folder: Path
    weights: dict[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    tie: bool
    experts: int = 0
    top_k: int = 0

    def forward(
        self, weights: Mapping[str, Tensor], tokens: Sequence[int], past: Past | None = None
    ) -> tuple[Tensor, Past]:
        """Logits [vocab] after the last of ``tokens``, and keys and values of all so far."""
        logits, kept = self.logits(weights, tokens, past)
        return logits[-1], kept

    @torch.inference_mode()
    def logits(
        self, weights: Mapping[str, Tensor], tokens: Sequence[int], past: Past | None = None
    ) -> tuple[Tensor, Past]:
        """The same after each of ``tokens``: [tokens, vocab]."""
        past = past or [None] * self.layers
        begin = past[0][0].shape[1] if past[0] is not None else 0
        places = torch.arange(begin, begin + len(tokens))
        kept: Past = []
        x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for index in range(self.layers):
            prefix = f"model.layers.{index}."
            layer = {name: weights[prefix + name] for name in (*ATTENTION_TENSORS, *NORM_TENSORS)}
            attended, kv = self._attend(layer, x, places, past[index])
            kept.append(kv)
            x = x + attended
            normed = _rms(x, layer["post_attention_layernorm.weight"])
            x = x + self._feed_forward(weights, f"{prefix}mlp.", normed)
        head = weights["model.embed_tokens.weight" if self.tie else "lm_head.weight"]
        return _rms(x, weights["model.norm.weight"]) @ head.T, kept

    def greedy(self, weights: Mapping[str, Tensor], prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest ``count`` tokens after ``prompt``; no end is heeded."""
        logits, past = self.forward(weights, prompt)
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            logits, past = self.forward(weights, tokens[-1:], past)
            tokens.append(int(logits.argmax()))
        return tokens

    def score(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], tokens: Sequence[int]
    ) -> list[float]:
        """The log-probability of each token, behind the prompt and those before it."""
        logits, past = self.forward(weights, prompt)
        scored = []
        for token in tokens:
            scored.append(float(logits.log_softmax(-1)[token]))
            logits, past = self.forward(weights, [token], past)
        return scored

    def _feed_forward(self, weights: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
        if not self.experts:
            return _swiglu(weights, prefix, x)
        share, chosen = (x @ weights[f"{prefix}gate.weight"].T).softmax(-1).topk(self.top_k)
        parts = torch.zeros(len(x), self.experts)
        parts.scatter_(1, chosen, share / share.sum(-1, keepdim=True))
        return sum(
            (
                parts[:, expert, None] * _swiglu(weights, f"{prefix}experts.{expert}.", x)
                for expert in range(self.experts)
            ),
            start=torch.zeros_like(x),
        )

    def _attend(
        self,
        layer: Mapping[str, Tensor],
        x: Tensor,
        places: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        time = len(x)
        normed = _rms(x, layer["input_layernorm.weight"])
        query = (normed @ layer["self_attn.q_proj.weight"].T).view(time, self.heads, HEAD_DIM)
        key = (normed @ layer["self_attn.k_proj.weight"].T).view(time, self.kv_heads, HEAD_DIM)
        value = (normed @ layer["self_attn.v_proj.weight"].T).view(time, self.kv_heads, HEAD_DIM)
        query = _rotate(_rms(query, layer["self_attn.q_norm.weight"]).transpose(0, 1), places)
        key = _rotate(_rms(key, layer["self_attn.k_norm.weight"]).transpose(0, 1), places)
        value = value.transpose(0, 1)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=1), torch.cat((past[1], value), dim=1)
        share = self.heads // self.kv_heads
        scores = query @ key.repeat_interleave(share, 0).transpose(1, 2) * HEAD_DIM**-0.5
        hidden = torch.arange(key.shape[1]) > places[:, None]
        weighted = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = weighted @ value.repeat_interleave(share, 0)
        out = mixed.transpose(0, 1).reshape(time, -1) @ layer["self_attn.o_proj.weight"].T
        return out, (key, value)


def make_checkpoint(
    folder: Path,
    seed: int,
    *,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 128,
    tie: bool = False,
    max_positions: int = 512,
    dtype: str = "float32",
    eos_token_id: int = 2,
    experts: int = 0,
    top_k: int = 2,
) -> Checkpoint:
    """Write ``config.json`` and ``model.safetensors`` into ``folder``.

    With ``experts`` it is a ``qwen3_moe``, each of whose tokens goes to ``top_k`` of them.

    ``hidden`` must be a multiple of 32, the width of a head, and ``vocab`` of 64, as
    vLLM wants it on CPUs. Two query heads share a KV head.
    """
    heads = hidden // HEAD_DIM
    kv_heads = max(heads // 2, 1)
    shapes = _shapes(layers, hidden, vocab, heads, kv_heads, tie=tie, experts=experts)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if experts else "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_positions,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "rms_norm_eps": RMS_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
        "dtype": dtype,
    }
    if experts:
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(folder, weights, layers, heads, kv_heads, tie, experts, top_k)


def certain_experts(folder: Path, *, max_positions: int = 512) -> Checkpoint:
    """A model whose tokens all go to each of its four experts.

    For oracles that compare millions of tokens: of a hundred thousand tokens, one has its second
    and third expert within 3e-7 of each other, and which of them it goes to then hangs on the
    order of a sum.
    """
    return make_checkpoint(folder, seed=8, experts=4, top_k=4, max_positions=max_positions)


def make_eagle(folder: Path, seed: int, *, hidden: int = 64, vocab: int = 128) -> dict[str, Tensor]:
    """Write an EAGLE draft for a checkpoint of the same sizes: one layer of a Llama, without
    embeddings and output head of its own. Returns its weights."""
    heads = hidden // HEAD_DIM
    kv_heads = max(heads // 2, 1)
    inner = 2 * hidden
    matrices = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (heads * HEAD_DIM, hidden),
        "layers.0.self_attn.k_proj": (kv_heads * HEAD_DIM, hidden),
        "layers.0.self_attn.v_proj": (kv_heads * HEAD_DIM, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * HEAD_DIM),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": shape for n, shape in matrices.items()}
    shapes["layers.0.post_attention_layernorm.weight"] = (hidden,)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": RMS_EPS,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def perturbed(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Another full set of weights: each matrix turned halfway towards a fresh random one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (weight + _random(name, tuple(weight.shape), generator)) * 0.5**0.5
        for name, weight in weights.items()
    }


def _shapes(
    layers: int, hidden: int, vocab: int, heads: int, kv_heads: int, *, tie: bool, experts: int
) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes, in the order of a state dict."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    attention: tuple[tuple[int, ...], ...] = (
        (heads * HEAD_DIM, hidden),
        (kv_heads * HEAD_DIM, hidden),
        (kv_heads * HEAD_DIM, hidden),
        (hidden, heads * HEAD_DIM),
        (HEAD_DIM,),
        (HEAD_DIM,),
    )
    for index in range(layers):
        for name, shape in zip(ATTENTION_TENSORS, attention, strict=True):
            shapes[f"model.layers.{index}.{name}"] = shape
        mlp, inner = f"model.layers.{index}.mlp.", hidden if experts else 2 * hidden
        if experts:
            shapes[f"{mlp}gate.weight"] = (experts, hidden)
        for prefix in [f"{mlp}experts.{e}." for e in range(experts)] or [mlp]:
            down = (hidden, inner)
            for name, shape in zip(FEED_FORWARD, (down[::-1], down[::-1], down), strict=True):
                shapes[prefix + name] = shape
        for name in NORM_TENSORS:
            shapes[f"model.layers.{index}.{name}"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not tie:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Layers outweigh the embedding, and attention is sharp: greedy output varies."""
    drawn = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return (1 + 0.1 * drawn) * (3.0 if name.endswith("q_norm.weight") else 1.0)
    if name == "model.embed_tokens.weight":
        return drawn * 0.1
    gain = 2.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
    return drawn * (gain / math.sqrt(shape[1]))


def _swiglu(weights: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (weights[prefix + name].T for name in FEED_FORWARD)
    return (F.silu(x @ gate) * (x @ up)) @ down


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + RMS_EPS) * weight


def _rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotary positions over the halves of the last axis of [heads, time, head_dim]."""
    speed = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angle = places[:, None].float() * speed
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
