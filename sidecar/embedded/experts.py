"""A mixture of experts: each token is computed by a few of many feed-forward networks.

Arithmetic follows Hugging Face's ``Qwen3MoeSparseMoeBlock``. Experts may be spread over
the ranks of a data parallel group; where a token's experts are elsewhere, its hidden
state travels there and the result back, by an :class:`Exchange`. Everything else is
the same for one rank and for many, and so are the sums' order and the greedy tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own custom

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sidecar.embedded.config import ExpertsConfig


class Exchange(Protocol):
    """Brings rows to the ranks of their experts, and what comes of them back."""

    def own(self, experts: int) -> range:
        """Which of so many experts are this rank's."""

    def dispatch(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        """Send ``rows`` [n, hidden], sorted by expert, ``counts[e]`` of them for expert ``e``.

        Returns:
            The rows for this rank's experts, those of one source after those of another,
            each source's sorted by expert; and their counts, by source and own expert.
        """

    def combine(self, results: Tensor) -> Tensor:
        """Send one row back for each that the last :meth:`dispatch` brought; get one's own."""


class Alone:
    """The exchange of a rank that has all the experts."""

    def own(self, experts: int) -> range:
        return range(experts)

    def dispatch(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        return rows, [list(counts)]

    def combine(self, results: Tensor) -> Tensor:
        return results


class Mixture:
    """The experts of one layer.

    Args:
        config: how many there are, and how tokens choose.
        gate: [experts, hidden], which makes a token's preference for each expert.
        own: (gate_up, down) of each of this rank's experts.
        exchange: the way to the others; a call to this blocks until all ranks have
            called.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        gate: Tensor,
        own: Sequence[tuple[Tensor, Tensor]],
        exchange: Exchange,
    ) -> None:
        self._config = config
        self._gate = gate
        self._own = own
        self._exchange = exchange

    def __call__(self, x: Tensor) -> Tensor:
        """From [n, hidden] to [n, hidden]; ``n`` may be 0, for the sake of the other ranks."""
        preference = torch.softmax(F.linear(x, self._gate), dim=-1, dtype=torch.float32)
        share, chosen = torch.topk(preference, self._config.top_k, dim=-1)
        if self._config.norm_top_k:
            share = share / share.sum(dim=-1, keepdim=True)
        # One row for each token and expert of it, sorted by expert.
        flat = chosen.view(-1)
        order = flat.argsort(stable=True)
        token = order // self._config.top_k
        counts = torch.bincount(flat, minlength=self._config.count).tolist()
        rows, of_source = self._exchange.dispatch(x[token], counts)
        results = self._exchange.combine(self._compute(rows, of_source))
        weighted = results * share.to(x.dtype).view(-1)[order, None]
        return torch.zeros_like(x).index_add_(0, token, weighted)

    def _compute(self, rows: Tensor, of_source: list[list[int]]) -> Tensor:
        """Each row by its expert; where several sources send to one, in one go."""
        segments = torch.split(rows, [count for counts in of_source for count in counts])
        experts = len(self._own)
        results: list[Tensor] = list(segments)
        for expert, (gate_up, down) in enumerate(self._own):
            places = [p for p in range(expert, len(segments), experts) if len(segments[p])]
            if not places:
                continue
            mine = [segments[place] for place in places]
            gate, up = F.linear(torch.cat(mine), gate_up).chunk(2, dim=-1)
            computed = F.linear(F.silu(gate) * up, down)
            for place, part in zip(
                places, torch.split(computed, [len(m) for m in mine]), strict=True
            ):
                results[place] = part
        return torch.cat(results)
