"""A Qwen3 decoder for inference: fused projections and a slot-based KV cache.

Arithmetic follows Hugging Face's ``Qwen3ForCausalLM``; in float32 greedy tokens are
equal. One row of a decode batch is one slot of the cache, so that a batch of ``n``
sequences is the first ``n`` slots and nothing is gathered: whoever owns the batch
keeps it dense with :meth:`KvCache.move`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from sidecar.embedded.weights import layout_of

if TYPE_CHECKING:
    from sidecar.embedded.config import ModelConfig


class KvCache:
    """Keys and values of every slot: [layers, slots, kv_heads, max_len, head_dim].

    What lies behind a sequence's length is never attended to, but takes part in
    arithmetic under a weight of zero, so it must stay finite: hence zeros, not
    whatever the memory held.
    """

    def __init__(self, config: ModelConfig, slots: int, max_len: int) -> None:
        shape = (config.num_layers, slots, config.num_kv_heads, max_len, config.head_dim)
        self.max_len = max_len
        self.keys = torch.zeros(shape, dtype=config.torch_dtype)
        self.values = torch.zeros(shape, dtype=config.torch_dtype)
        # One row per (slot, head, position), for a write without advanced indexing.
        self._flat_keys = self.keys.view(config.num_layers, -1, config.head_dim)
        self._flat_values = self.values.view(config.num_layers, -1, config.head_dim)
        self._slot_rows = torch.arange(slots * config.num_kv_heads).view(slots, -1) * max_len
        self._touched = 0

    def rows(self, positions: Tensor, deepest: int) -> Tensor:
        """Where slot ``i`` keeps position ``positions[i]``: [n * kv_heads] rows of a layer."""
        self._touched = max(self._touched, deepest)
        return (self._slot_rows[: len(positions)] + positions[:, None]).view(-1)

    def put(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write one position per slot; ``key`` and ``value`` are [n, kv_heads, head_dim]."""
        dim = key.shape[-1]
        self._flat_keys[layer].index_copy_(0, rows, key.reshape(-1, dim))
        self._flat_values[layer].index_copy_(0, rows, value.reshape(-1, dim))

    def fill(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write from position 0; ``key`` and ``value`` are [b, kv_heads, time, head_dim]."""
        time = key.shape[2]
        self._touched = max(self._touched, time)
        self.keys[layer, slots, :, :time] = key
        self.values[layer, slots, :, :time] = value

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of a slot over another slot."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def clear(self) -> None:
        """Forget everything."""
        self.keys[:, :, :, : self._touched] = 0
        self.values[:, :, :, : self._touched] = 0
        self._touched = 0


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parameters of one layer: the same tensors as in ``Qwen3.parameters``."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Qwen3:
    """The decoder and its cache. ``parameters`` are loaded in place, and only between steps.

    Args:
        config: the sizes.
        slots: sequences that may run at once.
        max_len: tokens that one sequence may have, prompt and output.
    """

    def __init__(self, config: ModelConfig, *, slots: int, max_len: int) -> None:
        self.config = config
        self.layout = layout_of(config)
        self.parameters = {
            name: torch.zeros(shape, dtype=config.torch_dtype)
            for name, shape in self.layout.parameters.items()
        }
        self.kv = KvCache(config, slots, max_len)
        self._layers = [self._layer(index) for index in range(config.num_layers)]
        self._embedding = self.parameters["model.embed_tokens.weight"]
        self._norm = self.parameters["model.norm.weight"]
        self._head = self._embedding if config.tied else self.parameters["lm_head.weight"]
        self._cos, self._sin = _rope_tables(config, max_len)
        self._places = torch.arange(max_len)

    def decode(self, tokens: list[int], positions: list[int]) -> Tensor:
        """One more token for each of the first ``n`` slots; logits [n, vocab] in float32.

        ``positions[i]`` is where ``tokens[i]`` stands, counted from 0, which is also
        the number of positions that slot ``i`` has cached.
        """
        deepest = max(positions) + 1
        place = torch.tensor(positions)
        rows = self.kv.rows(place, deepest)
        cos, sin = self._cos[place].unsqueeze(1), self._sin[place].unsqueeze(1)
        seen = self._places[:deepest] <= place[:, None]
        mask = torch.zeros(seen.shape, dtype=self._cos.dtype).masked_fill_(~seen, -math.inf)
        mask = mask[:, None, None, :]
        count, heads, kv_heads = len(tokens), self.config.num_heads, self.config.num_kv_heads
        dim = self.config.head_dim

        x = self._embedding[torch.tensor(tokens)]
        for index, layer in enumerate(self._layers):
            qk, value = self._project(layer, x, cos, sin)
            self.kv.put(index, rows, qk[:, heads:], value)
            # Queries that share a KV head stand where a longer query has its positions.
            attended = F.scaled_dot_product_attention(
                qk[:, :heads].view(count, kv_heads, heads // kv_heads, dim),
                self.kv.keys[index, :count, :, :deepest],
                self.kv.values[index, :count, :, :deepest],
                attn_mask=mask,
            )
            x = self._finish_layer(layer, x, attended.reshape(count, heads * dim))
        return self._logits(x)

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> Tensor:
        """Compute whole prompts into their slots; logits [b, vocab] after each one's last token.

        Shorter prompts are padded on the right, where no real token looks.
        """
        lengths = [len(prompt) for prompt in prompts]
        batch, time = len(prompts), max(lengths)
        tokens = torch.zeros(batch, time, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        slot_index = torch.tensor(slots)
        cos = self._cos[:time].repeat(batch, 1).unsqueeze(1)
        sin = self._sin[:time].repeat(batch, 1).unsqueeze(1)
        heads, dim = self.config.num_heads, self.config.head_dim
        grouped = heads != self.config.num_kv_heads

        x = self._embedding[tokens.view(-1)]
        for index, layer in enumerate(self._layers):
            qk, value = self._project(layer, x, cos, sin)
            qk = qk.view(batch, time, -1, dim).transpose(1, 2)
            key = qk[:, heads:]
            value = value.reshape(batch, time, -1, dim).transpose(1, 2)
            self.kv.fill(index, slot_index, key, value)
            attended = F.scaled_dot_product_attention(
                qk[:, :heads], key, value, is_causal=True, enable_gqa=grouped
            )
            attended = attended.transpose(1, 2).reshape(batch * time, heads * dim)
            x = self._finish_layer(layer, x, attended)
        last = torch.arange(batch) * time + torch.tensor(lengths) - 1
        return self._logits(x[last])

    def _layer(self, index: int) -> _Layer:
        prefix = f"model.layers.{index}"
        get = self.parameters.__getitem__
        return _Layer(
            input_norm=get(f"{prefix}.input_layernorm.weight"),
            qkv=get(f"{prefix}.self_attn.qkv_proj.weight"),
            q_norm=get(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=get(f"{prefix}.self_attn.k_norm.weight"),
            out=get(f"{prefix}.self_attn.o_proj.weight"),
            post_norm=get(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=get(f"{prefix}.mlp.gate_up_proj.weight"),
            down=get(f"{prefix}.mlp.down_proj.weight"),
        )

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """From [n, hidden] to normed and rotated queries and keys, and values.

        Queries and keys come as one [n, heads + kv_heads, head_dim], so that norm
        and rotation are one operation for both.
        """
        config = self.config
        qk_heads = config.num_heads + config.num_kv_heads
        qkv = F.linear(self._rms(x, layer.input_norm), layer.qkv)
        split = qkv.view(len(x), -1, config.head_dim)
        scale = torch.cat(
            (
                layer.q_norm.expand(config.num_heads, -1),
                layer.k_norm.expand(config.num_kv_heads, -1),
            )
        )
        qk = self._rms(split[:, :qk_heads], scale)
        qk = torch.addcmul(qk * cos, torch.roll(qk, config.head_dim // 2, -1), sin)
        return qk, split[:, qk_heads:]

    def _finish_layer(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended, layer.out)
        gate, up = F.linear(self._rms(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._rms(x, self._norm), self._head).float()

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """Unit root mean square over the last axis, computed in float32, then scaled."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_eps)
        return normed.to(x.dtype) * weight


def _rope_tables(config: ModelConfig, max_len: int) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines [max_len, head_dim].

    Rotation takes ``x * cos + roll(x, head_dim / 2) * sin``, so the first half of the
    sines carries the minus sign.
    """
    dim = config.head_dim
    speed = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.arange(max_len, dtype=torch.float32)[:, None] * speed
    sin = angle.sin()
    dtype = config.torch_dtype
    return angle.cos().repeat(1, 2).to(dtype), torch.cat((-sin, sin), dim=1).to(dtype)
