"""Whose weights tokens are from: each token of an answer, against the weights of its version.

The reference computes an answer segment by segment, each with one version's weights, over the
keys and values that an engine has then: those that it computed with the versions before, or, if
the pause dropped the cache, new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint, Past

# Between the likeliest token and one that an engine may take for it: sums differ in their order.
_TIE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of an answer, made with one version's weights."""

    version: int
    start: int
    end: int


def foreign_tokens(
    checkpoint: Checkpoint,
    weights: Callable[[int], Mapping[str, Tensor]],
    prompt: Sequence[int],
    tokens: Sequence[int],
    spans: Sequence[Span],
    *,
    clear_cache: Callable[[int], bool],
) -> list[int]:
    """Which of a greedy answer's tokens are not those of their version.

    Args:
        checkpoint: whose model it is.
        weights: those of a version.
        prompt, tokens: the request and its answer.
        spans: the versions of all tokens.
        clear_cache: whether the pause of a version's update dropped keys and values.
    """
    everything = [*prompt, *tokens]
    past: Past | None = None
    done = 0  # inputs whose keys and values are in ``past``
    wrong: list[int] = []
    for span in spans:
        if clear_cache(span.version):
            past, done = None, 0
        until = len(prompt) + span.end - 1
        with torch.inference_mode():
            logits, past = checkpoint.logits(weights(span.version), everything[done:until], past)
        best = logits.max(dim=-1).values
        for place in range(span.start, span.end):
            row = len(prompt) + place - 1 - done
            if logits[row, tokens[place]] < best[row] - _TIE:
                wrong.append(place)
        done = until
    return wrong
