"""A Qwen3 decoder for inference: fused projections and a slot-based KV cache.

Arithmetic follows Hugging Face's ``Qwen3ForCausalLM`` and ``Qwen3MoeForCausalLM``; in
float32 greedy tokens are equal. One row of a decode batch is one slot of the cache, so
that a batch of ``n`` sequences is the first ``n`` slots and nothing is gathered: whoever
owns the batch keeps it dense with :meth:`KvCache.move`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from sidecar.embedded.experts import Alone, Mixture
from sidecar.embedded.weights import layout_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.embedded.config import ModelConfig
    from sidecar.embedded.experts import Exchange


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

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Remember what was there when these were copied."""
        self.keys.copy_(keys)
        self.values.copy_(values)
        self._touched = self.max_len


@dataclass(frozen=True, slots=True)
class Decode:
    """One more token for each of the first ``n`` slots.

    ``positions[i]`` is where ``tokens[i]`` stands, counted from 0, which is also the
    number of positions that slot ``i`` has cached.
    """

    tokens: list[int]
    positions: list[int]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Whole prompts, each for its slot.

    Shorter prompts are padded on the right, where no real token looks.
    """

    prompts: list[list[int]]
    slots: list[int]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parameters of one layer: the same tensors as in ``Qwen3.parameters``."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    feed_forward: Callable[[Tensor], Tensor]


class Qwen3:
    """The decoder and its cache. ``parameters`` are loaded in place, and only between steps.

    Args:
        config: the sizes.
        slots: sequences that may run at once.
        max_len: tokens that one sequence may have, prompt and output.
        exchange: where experts are spread over ranks, the way to the others. Then a
            step blocks until each of them makes one, if only with :meth:`dummy`.
    """

    def __init__(
        self, config: ModelConfig, *, slots: int, max_len: int, exchange: Exchange | None = None
    ) -> None:
        self.config = config
        self._exchange = exchange or Alone()
        experts = config.experts
        self._own_experts = self._exchange.own(experts.count) if experts else range(0)
        self.layout = layout_of(config, self._own_experts)
        self.parameters = {
            name: torch.zeros(shape, dtype=config.torch_dtype)
            for name, shape in self.layout.here.items()
        }
        self.kv = KvCache(config, slots, max_len)
        self._layers = [self._layer(index) for index in range(config.num_layers)]
        self._mixtures = [
            m for layer in self._layers if isinstance(m := layer.feed_forward, Mixture)
        ]
        self._embedding = self.parameters["model.embed_tokens.weight"]
        self._norm = self.parameters["model.norm.weight"]
        self._head = self._embedding if config.tied else self.parameters["lm_head.weight"]
        self._cos, self._sin = _rope_tables(config, max_len)

    def decode(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Logits [n, vocab] of a :class:`Decode` alone."""
        return self.step(Decode(tokens, positions), None)

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> Tensor:
        """Logits [b, vocab] of a :class:`Prefill` alone."""
        return self.step(None, Prefill(prompts, slots))

    def step(self, decode: Decode | None, prefill: Prefill | None) -> Tensor:
        """One pass over the layers for either or both; they use different slots.

        Returns:
            Logits in float32, [n + b, vocab]: after each decoded token, and after the
            last one of each prompt.
        """
        parts: list[_Decoding | _Prefilling] = []
        if decode is not None:
            parts.append(_Decoding(self, decode))
        if prefill is not None:
            parts.append(_Prefilling(self, prefill))
        places = _joined([part.places for part in parts])
        cos, sin = self._cos[places].unsqueeze(1), self._sin[places].unsqueeze(1)
        x = self._embedding[_joined([part.tokens for part in parts])]
        sizes = [len(part.places) for part in parts]
        for index, layer in enumerate(self._layers):
            qk, value = self._project(layer, x, cos, sin)
            if len(parts) == 1:
                attended = parts[0].attend(index, qk, value)
            else:
                both = zip(parts, torch.split(qk, sizes), torch.split(value, sizes), strict=True)
                attended = torch.cat([part.attend(index, *own) for part, *own in both])
            x = self._finish_layer(layer, x, attended)
        return self._logits(
            _joined(
                [part.last(own) for part, own in zip(parts, torch.split(x, sizes), strict=True)]
            )
        )

    def dummy(self) -> None:
        """A step without a token, so that the other ranks can make theirs."""
        nothing = torch.empty(0, self.config.hidden_size, dtype=self.config.torch_dtype)
        for mixture in self._mixtures:
            mixture(nothing)

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
            feed_forward=self._feed_forward(index, f"{prefix}.mlp"),
        )

    def _feed_forward(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        def pair(name: str) -> tuple[Tensor, Tensor]:
            get = self.parameters.__getitem__
            return get(f"{name}.gate_up_proj.weight"), get(f"{name}.down_proj.weight")

        experts = self.config.experts
        if experts is None or index not in experts.layers:
            gate_up, down = pair(prefix)

            def dense(x: Tensor) -> Tensor:
                gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
                return F.linear(F.silu(gate) * up, down)

            return dense
        return Mixture(
            experts,
            self.parameters[f"{prefix}.gate.weight"],
            [pair(f"{prefix}.experts.{expert}") for expert in self._own_experts],
            self._exchange,
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
        return x + layer.feed_forward(self._rms(x, layer.post_norm))

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._rms(x, self._norm), self._head).float()

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """Unit root mean square over the last axis, computed in float32, then scaled."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_eps)
        return normed.to(x.dtype) * weight


class _Decoding:
    """The part of a step that decodes: its attention reads the cache."""

    def __init__(self, model: Qwen3, what: Decode) -> None:
        config = model.config
        self._kv = model.kv
        self._count, self._deepest = len(what.tokens), max(what.positions) + 1
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._dim = config.head_dim
        self.tokens = torch.tensor(what.tokens)
        self.places = torch.tensor(what.positions)
        self._rows = model.kv.rows(self.places, self._deepest)
        hidden = torch.arange(self._deepest) > self.places[:, None]
        mask = torch.zeros(hidden.shape, dtype=config.torch_dtype)
        self._mask = mask.masked_fill_(hidden, -math.inf)[:, None, None, :]

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        count, heads, kv_heads, dim = self._count, self._heads, self._kv_heads, self._dim
        self._kv.put(layer, self._rows, qk[:, heads:], value)
        # Queries that share a KV head stand where a longer query has its positions.
        attended = F.scaled_dot_product_attention(
            qk[:, :heads].view(count, kv_heads, heads // kv_heads, dim),
            self._kv.keys[layer, :count, :, : self._deepest],
            self._kv.values[layer, :count, :, : self._deepest],
            attn_mask=self._mask,
        )
        return attended.reshape(count, heads * dim)

    def last(self, x: Tensor) -> Tensor:
        return x


class _Prefilling:
    """The part of a step that takes in prompts: its attention is among its own tokens."""

    def __init__(self, model: Qwen3, what: Prefill) -> None:
        config = model.config
        lengths = [len(prompt) for prompt in what.prompts]
        self._kv = model.kv
        self._batch, self._time = len(lengths), max(lengths)
        self._heads, self._dim = config.num_heads, config.head_dim
        self._grouped = config.num_heads != config.num_kv_heads
        self._slots = torch.tensor(what.slots)
        tokens = torch.zeros(self._batch, self._time, dtype=torch.long)
        for row, prompt in enumerate(what.prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.tokens = tokens.view(-1)
        self.places = torch.arange(self._time).repeat(self._batch)
        self._ends = torch.arange(self._batch) * self._time + torch.tensor(lengths) - 1

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        batch, time, heads = self._batch, self._time, self._heads
        qk = qk.view(batch, time, -1, self._dim).transpose(1, 2)
        key = qk[:, heads:]
        value = value.reshape(batch, time, -1, self._dim).transpose(1, 2)
        self._kv.fill(layer, self._slots, key, value)
        attended = F.scaled_dot_product_attention(
            qk[:, :heads], key, value, is_causal=True, enable_gqa=self._grouped
        )
        return attended.transpose(1, 2).reshape(batch * time, heads * self._dim)

    def last(self, x: Tensor) -> Tensor:
        return x[self._ends]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
