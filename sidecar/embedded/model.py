"""Runs a Qwen3 network step by step, with a cache of keys and values.

Row ``i`` of a decode batch is slot ``i`` of the cache. So a batch of ``n`` sequences is the first
``n`` slots, and nothing is gathered. The owner of the batch closes gaps with :meth:`KvCache.move`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own custom
from torch.nn.utils.rnn import pad_sequence

from sidecar.embedded.qwen3 import Mixture, Qwen3, attend_whole, rope_of
from sidecar.embedded.weights import ExpectedWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.embedded.qwen3 import Exchange, Qwen3Config


class KvCache:
    """Keys and values of every slot: [layers, slots, kv_heads, max_len, head_dim].

    Positions behind a sequence's length enter the arithmetic with a weight of zero. They must be
    finite, so the cache begins with zeros.
    """

    def __init__(self, config: Qwen3Config, slots: int, max_len: int) -> None:
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
        """Returns the row indices of one position per slot, [n * kv_heads].

        The indices count rows of one layer's flattened cache: (slot, head, position).

        Args:
            positions: the position of each slot, [n].
            deepest: the largest position plus 1; :meth:`clear` zeroes the positions below it.
        """
        self._touched = max(self._touched, deepest)
        return (self._slot_rows[: len(positions)] + positions[:, None]).view(-1)

    def put(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes one position per slot; ``key`` and ``value`` are [n, kv_heads, head_dim]."""
        dim = key.shape[-1]
        self._flat_keys[layer].index_copy_(0, rows, key.reshape(-1, dim))
        self._flat_values[layer].index_copy_(0, rows, value.reshape(-1, dim))

    def fill(self, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        """Writes slots from ``first`` on, and positions from 0 on.

        ``key`` and ``value`` are [b, kv_heads, time, head_dim].
        """
        count, _, time, _ = key.shape
        self._touched = max(self._touched, time)
        self.keys[layer, first : first + count, :, :time] = key
        self.values[layer, first : first + count, :, :time] = value

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` positions of a slot over another slot."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def clear(self) -> None:
        """Discards all keys and values."""
        self.keys[:, :, :, : self._touched] = 0
        self.values[:, :, :, : self._touched] = 0
        self._touched = 0

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Replaces all keys and values by copies that were made before."""
        self.keys.copy_(keys)
        self.values.copy_(values)
        self._touched = self.max_len


class ModelRunner:
    """Runs a network with its cache. ``parameters`` are loaded in place, only between steps.

    Args:
        config: the network's sizes.
        slots: sequences that may run at once.
        max_len: tokens that one sequence may have, prompt and output.
        exchange: sends rows to experts on other ranks. A step then blocks until every rank makes
            one, if only with :meth:`dummy`.
    """

    def __init__(
        self, config: Qwen3Config, *, slots: int, max_len: int, exchange: Exchange | None = None
    ) -> None:
        self.config = config
        network = whole = Qwen3(config, exchange)
        if exchange is not None:
            with torch.device("meta"):
                whole = Qwen3(config)
        self.expected = ExpectedWeights.of(whole)
        self._network = network.to(config.torch_dtype).requires_grad_(False)
        self.parameters = dict(self._network.named_parameters())
        self.kv = KvCache(config, slots, max_len)
        self._cos, self._sin = (
            each.to(config.torch_dtype) for each in rope_of(torch.arange(max_len), config)
        )

    def step(
        self,
        tokens: Sequence[int] = (),
        positions: Sequence[int] = (),
        prompts: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """Makes one pass over the layers, for sequences that decode and for new ones.

        Args:
            tokens: the last token of each of the first ``n`` slots.
            positions: these tokens' positions, from 0, which is also how many positions of each
                slot are cached.
            prompts: ``b`` whole prompts, for the slots that follow.

        Returns:
            Logits in float32, [n + b, vocab]: after each token, and after each prompt.
        """
        parts: list[_Decoding | _Prefilling] = []
        if tokens:
            parts.append(_Decoding(self, tokens, positions))
        if prompts:
            parts.append(_Prefilling(self, len(tokens), prompts))
        sizes = [len(part.places) for part in parts]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if len(parts) == 1:
                return parts[0].attend(layer, query, key, value)
            split = (torch.split(each, sizes) for each in (query, key, value))
            own = zip(parts, *split, strict=True)
            return torch.cat([part.attend(layer, *qkv) for part, *qkv in own])

        places = torch.cat([part.places for part in parts])
        ids = torch.cat([part.tokens for part in parts])
        hidden = self._network.model(ids, (self._cos[places], self._sin[places]), attend)
        own = zip(parts, torch.split(hidden, sizes), strict=True)
        logits: Tensor = self._network.lm_head(torch.cat([part.last(each) for part, each in own]))
        return logits.float()

    def dummy(self) -> None:
        """Makes a step without a token, so that the other ranks can make theirs."""
        nothing = torch.empty(0, self.config.hidden_size, dtype=self.config.torch_dtype)
        for module in self._network.modules():
            if isinstance(module, Mixture):
                module(nothing)


class _Decoding:
    """The part of a step that decodes: its attention reads the cache."""

    def __init__(self, model: ModelRunner, tokens: Sequence[int], positions: Sequence[int]) -> None:
        self._kv = model.kv
        self._deepest = max(positions) + 1
        self.tokens = torch.tensor(tokens)
        self.places = torch.tensor(positions)
        self._rows = model.kv.rows(self.places, self._deepest)
        hidden = torch.arange(self._deepest) > self.places[:, None]
        mask = torch.zeros(hidden.shape, dtype=model.config.torch_dtype)
        self._mask = mask.masked_fill_(hidden, -math.inf)[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        count, kv_heads, dim = key.shape
        self._kv.put(layer, self._rows, key, value)
        # Queries that share a KV head take the axis of a query's positions.
        attended = F.scaled_dot_product_attention(
            query.view(count, kv_heads, -1, dim),
            self._kv.keys[layer, :count, :, : self._deepest],
            self._kv.values[layer, :count, :, : self._deepest],
            attn_mask=self._mask,
        )
        return attended.reshape(query.shape)

    def last(self, x: Tensor) -> Tensor:
        return x


class _Prefilling:
    """The part of a step that computes prompts: each prompt's attention reads its own tokens."""

    def __init__(self, model: ModelRunner, first: int, prompts: Sequence[Sequence[int]]) -> None:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        # Padded on the right, where the causal mask hides the padding from real tokens.
        tokens = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        self._kv = model.kv
        self._shape = (*tokens.shape, -1, model.config.head_dim)
        self._first = first
        batch, time = tokens.shape
        self.tokens = tokens.view(-1)
        self.places = torch.arange(time).repeat(batch)
        self._ends = torch.arange(batch) * time + lengths - 1

    def attend(self, layer: int, *qkv: Tensor) -> Tensor:
        query, key, value = (each.view(self._shape) for each in qkv)
        self._kv.fill(layer, self._first, key.transpose(1, 2), value.transpose(1, 2))
        return attend_whole(layer, query, key, value).flatten(0, 1)

    def last(self, x: Tensor) -> Tensor:
        return x[self._ends]
