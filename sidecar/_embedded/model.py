"""Runs a Qwen3 network step by step, with a cache of keys and values.

Each running sequence has a slot of the cache. A batch of ``n`` sequences is in the first ``n``
slots, so that a step reads the cache without gathering slots. When a sequence ends, the owner of
the batch fills the gap with :meth:`KvCache.move`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own custom
from torch.nn.utils.rnn import pad_sequence

from sidecar._embedded.qwen3 import Mixture, Qwen3, attend_whole, rope_of
from sidecar._embedded.weights import ExpectedWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar._embedded.qwen3 import Exchange, Qwen3Config


class KvCache:
    """Stores the keys and values of running sequences, one slot for each sequence.

    Both are tensors of shape [layers, slots, kv_heads, max_len, head_dim]. Positions beyond a
    sequence's length enter the attention with weight zero, and must be finite for that. So the
    cache begins with zeros.

    Args:
        slots: how many sequences may run at once.
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
        """Returns where to write one position per slot, as row indices [n * kv_heads].

        :meth:`put` takes these indices. They count the rows of one layer's cache, flattened over
        slot, head and position.

        Args:
            positions: the position to write in each of the first ``n`` slots, [n].
            deepest: the largest position plus 1; :meth:`clear` zeroes the positions below it.
        """
        self._touched = max(self._touched, deepest)
        return (self._slot_rows[: len(positions)] + positions[:, None]).view(-1)

    def put(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes one position of each slot, for sequences that decode.

        Args:
            layer: the layer's number, from 0.
            rows: where to write, from :meth:`rows`.
            key: [n, kv_heads, head_dim].
            value: [n, kv_heads, head_dim].
        """
        dim = key.shape[-1]
        self._flat_keys[layer].index_copy_(0, rows, key.reshape(-1, dim))
        self._flat_values[layer].index_copy_(0, rows, value.reshape(-1, dim))

    def fill(self, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        """Writes whole prompts of new sequences, into neighbouring slots from position 0 on.

        Args:
            layer: the layer's number, from 0.
            first: the first sequence's slot.
            key: [sequences, kv_heads, tokens, head_dim].
            value: [sequences, kv_heads, tokens, head_dim].
        """
        count, _, time, _ = key.shape
        self._touched = max(self._touched, time)
        self.keys[layer, first : first + count, :, :time] = key
        self.values[layer, first : first + count, :, :time] = value

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the keys and values of a sequence into another slot of the cache.

        Args:
            source: the sequence's slot.
            target: the slot to copy to.
        """
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def clear(self) -> None:
        """Discards all keys and values: overwrites them with zeros."""
        self.keys[:, :, :, : self._touched] = 0
        self.values[:, :, :, : self._touched] = 0
        self._touched = 0

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Replaces the whole content, after the canary's probes have used the cache."""
        self.keys.copy_(keys)
        self.values.copy_(values)
        self._touched = self.max_len


class ModelRunner:
    """Computes the steps of one network, with its cache of keys and values.

    Args:
        slots: how many sequences may run at once.
        max_len: how many tokens one sequence may have, prompt and output.
        exchange: sends hidden states to experts on other ranks; None if all experts are here. With
            an exchange, a step blocks until every rank calls :meth:`step` or :meth:`dummy`.

    Attributes:
        parameters: the network's parameters by name. Updates overwrite them between steps.
        expected: the tensors of a whole update, also of experts on other ranks.
        kv: the cache.
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
        """Computes the next token's logits of every sequence, in one pass over the layers.

        Args:
            tokens: the last token of each running sequence; these are in the first ``n`` slots.
            positions: the position of each of these tokens, from 0. All positions before it are in
                the cache.
            prompts: the whole prompts of ``b`` new sequences, which get the slots after the first
                ``n``.

        Returns:
            Logits in float32, [n + b, vocab]: of the running sequences, then of the new ones.
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
