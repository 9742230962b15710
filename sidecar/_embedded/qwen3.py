"""The Qwen3 network in torch modules, for the embedded engine.

The names of the parameters and the arithmetic are those of Hugging Face's ``Qwen3ForCausalLM`` and
``Qwen3MoeForCausalLM``, so one state dict serves this module, transformers and vLLM. The caller
provides attention: the engine's reads a cache, and :func:`attend_whole` sees whole sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, TypeAlias, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom

if TYPE_CHECKING:
    from collections.abc import Sequence

Size: TypeAlias = Annotated[int, Meta(ge=1)]
Rope: TypeAlias = tuple[Tensor, Tensor]

# Hugging Face's names for fields of Qwen3Config, where they differ.
_MIXTURE_NAMES: Final = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "norm_shares": "norm_topk_prob",
    "mixture_every": "decoder_sparse_step",
    "dense_layers": "mlp_only_layers",
}
_HF_NAMES: Final = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "rms_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "eos_id": "eos_token_id",
    **_MIXTURE_NAMES,
}


class Qwen3Config(msgspec.Struct, frozen=True, kw_only=True, rename=_HF_NAMES):
    """The sizes of a Qwen3 network: lengths in tokens, widths in elements.

    Attributes:
        tied: whether the output layer uses the embedding's parameters.
        eos_id: the token, or tokens, that end a sequence.
        experts: the number of experts in a mixture; 0 makes every layer dense.
        experts_per_token: how many experts compute a token.
        expert_size: inner width of an expert.
        norm_shares: whether the router's weights for a token's experts are scaled to sum to one.
        mixture_every: 2, say, gives every second layer a mixture.
        dense_layers: numbers, from 0, of layers that have no mixture in any case.
        dtype: torch's name of the parameters' dtype.
    """

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    max_positions: Size
    rope_theta: float
    rms_eps: float
    tied: bool = False
    eos_id: int | tuple[int, ...] | None = None
    experts: Annotated[int, Meta(ge=0)] = 0
    experts_per_token: Size = 1
    expert_size: Size = 1
    norm_shares: bool = False
    mixture_every: Size = 1
    dense_layers: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return cast("torch.dtype", getattr(torch, self.dtype))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end a sequence."""
        if isinstance(self.eos_id, tuple):
            return self.eos_id
        return () if self.eos_id is None else (self.eos_id,)

    def has_mixture(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, is a mixture of experts."""
        chosen = (layer + 1) % self.mixture_every == 0 and layer not in self.dense_layers
        return self.experts > 0 and chosen

    def to_hf(self) -> dict[str, Any]:
        """Returns the ``config.json`` content from which other libraries build this network."""
        changed = {
            each.encode_name: value
            for each in msgspec.structs.fields(Qwen3Config)
            if (value := getattr(self, each.name)) != each.default
            and (self.experts or each.name not in _MIXTURE_NAMES)
        }
        return {
            "architectures": [f"Qwen3{'Moe' if self.experts else ''}ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "layer_types": ["full_attention"] * self.num_layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "dtype": self.dtype,
            **changed,
        }


class Attend(Protocol):
    """A function that computes attention over keys and values that its owner keeps."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the attention's result for each query, in the shape of ``query``.

        Args:
            layer: the layer's number, from 0.
            query: [..., heads, head_dim], with rotary positions applied.
            key: [..., kv_heads, head_dim], with rotary positions applied.
            value: [..., kv_heads, head_dim].
        """


class Exchange(Protocol):
    """Connects one rank's part of a mixture of experts with the experts on other ranks.

    A row is the hidden state of one token for one of its experts.
    """

    def own(self, experts: int) -> range:
        """Returns which of ``experts`` experts this rank computes."""

    def dispatch(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        """Sends each row to its expert's rank, and receives rows for this rank's experts.

        Args:
            rows: [n, hidden], sorted by expert.
            counts: how many of the rows each expert gets.

        Returns:
            The received rows, sorted by source rank and then by expert; and how many of them come
                from each source rank for each expert of this rank.
        """

    def combine(self, results: Tensor) -> Tensor:
        """Sends results back to the ranks of their rows, and receives this rank's results.

        Args:
            results: the results of this rank's experts, in the order of the received rows.

        Returns:
            The results of the rows that this rank has sent, in their order.
        """


class Alone:
    """An exchange without other ranks, because this rank computes all experts."""

    def own(self, experts: int) -> range:
        return range(experts)

    def dispatch(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        return rows, [list(counts)]

    def combine(self, results: Tensor) -> Tensor:
        return results


class Linear(nn.Linear):
    """A matrix without bias, whose elements are not initialised.

    The owner loads the elements, or fills them with random numbers.
    """

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing, because the owner initialises the matrix."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and norms of queries and keys per head."""

    def __init__(self, config: Qwen3Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.dim = config.head_dim
        query, kv = config.num_heads * self.dim, config.num_kv_heads * self.dim
        self.q_proj = Linear(config.hidden_size, query)
        self.k_proj = Linear(config.hidden_size, kv)
        self.v_proj = Linear(config.hidden_size, kv)
        self.o_proj = Linear(query, config.hidden_size)
        self.q_norm = nn.RMSNorm(self.dim, config.rms_eps)
        self.k_norm = nn.RMSNorm(self.dim, config.rms_eps)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Computes self-attention: hidden states [..., hidden] to the same shape.

        Args:
            rope: rotary cosines and sines of their positions.
            attend: computes the attention itself.
        """
        heads = (*x.shape[:-1], -1, self.dim)
        query = _rotate(self.q_norm(self.q_proj(x).view(heads)), rope)
        key = _rotate(self.k_norm(self.k_proj(x).view(heads)), rope)
        attended = attend(self.layer, query, key, self.v_proj(x).view(heads))
        return cast("Tensor", self.o_proj(attended.flatten(-2)))


class Mlp(nn.Module):
    """A feed-forward network with the SwiGLU activation."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Mixture(nn.Module):
    """A layer of experts: a few of many feed-forward networks compute each token.

    Experts may be on other ranks. The order in which a token's results are added does not depend on
    the number of ranks.

    Args:
        exchange: connects this rank to the others' experts. With other ranks, :meth:`forward`
            blocks until all of them call it.
    """

    def __init__(self, config: Qwen3Config, exchange: Exchange) -> None:
        super().__init__()
        self._config = config
        self._exchange = exchange
        hidden = config.hidden_size
        self.gate = Linear(hidden, config.experts)
        self.experts = nn.ModuleDict(
            {str(own): Mlp(hidden, config.expert_size) for own in exchange.own(config.experts)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps hidden states [..., hidden] to the same shape.

        Without any hidden state, it only lets this rank's experts serve the other ranks.
        """
        config, tokens = self._config, x.flatten(0, -2)
        preference = torch.softmax(self.gate(tokens), dim=-1, dtype=torch.float32)
        share, chosen = torch.topk(preference, config.experts_per_token, dim=-1)
        if config.norm_shares:
            share = share / share.sum(dim=-1, keepdim=True)
        # One row for each expert of each token, sorted by expert.
        order = chosen.flatten().argsort(stable=True)
        owner = order // config.experts_per_token
        counts = torch.bincount(chosen.flatten(), minlength=config.experts).tolist()
        rows, of_source = self._exchange.dispatch(tokens[owner], counts)
        results = self._exchange.combine(self._compute(rows, of_source))
        weighted = results * share.to(x.dtype).flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, owner, weighted).view_as(x)

    def _compute(self, rows: Tensor, of_source: list[list[int]]) -> Tensor:
        """Computes each row by its expert, with rows of several source ranks at once."""
        segments = list(torch.split(rows, [count for counts in of_source for count in counts]))
        for index, expert in enumerate(self.experts.values()):
            every = range(index, len(segments), len(self.experts))
            places = [place for place in every if len(segments[place])]
            if not places:
                continue
            mine = [segments[place] for place in places]
            computed = torch.split(expert(torch.cat(mine)), [len(each) for each in mine])
            for place, part in zip(places, computed, strict=True):
                segments[place] = part
        return torch.cat(segments)


class Block(nn.Module):
    """One decoder layer: attention and feed-forward network, each after a norm."""

    def __init__(self, config: Qwen3Config, layer: int, exchange: Exchange) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = (
            Mixture(config, exchange)
            if config.has_mixture(layer)
            else Mlp(config.hidden_size, config.intermediate_size)
        )

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Maps hidden states [..., hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    """The network without its output layer: embedding, decoder layers and final norm.

    Its name in :class:`Qwen3` is ``model``, so that parameters have Hugging Face's names.
    """

    def __init__(self, config: Qwen3Config, exchange: Exchange) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [Block(config, layer, exchange) for layer in range(config.num_layers)]
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_eps)

    def forward(self, ids: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Returns hidden states [..., hidden] for token ids [...].

        Args:
            rope: rotary cosines and sines of their positions.
        """
        x: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope, attend)
        return cast("Tensor", self.norm(x))


class Qwen3(nn.Module):
    """A causal language model whose ``state_dict`` is a valid Qwen3 checkpoint.

    Args:
        exchange: connects this rank to experts on other ranks. Default: all experts are here.
    """

    def __init__(self, config: Qwen3Config, exchange: Exchange | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, exchange or Alone())
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def rotary_frequencies(config: Qwen3Config) -> Tensor:
    """Returns the angle per position of each pair of a head's elements, [head_dim / 2]."""
    return config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)


def rope_of(places: Tensor, config: Qwen3Config) -> Rope:
    """Returns rotary cosines and sines, both of shape [..., 1, head_dim], in float32.

    The first half of the sines carries the minus sign of the rotation.

    Args:
        places: positions in tokens, [...].
    """
    angle = places[..., None, None].float() * rotary_frequencies(config)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def attend_whole(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes causal attention for a batch of whole sequences, without a cache.

    It is an :class:`Attend` whose tensors have four axes: [batch, tokens, heads, head_dim].
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2)


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates the two halves of the last axis by the rotary angles."""
    return torch.addcmul(x * rope[0], torch.roll(x, x.shape[-1] // 2, -1), rope[1])
