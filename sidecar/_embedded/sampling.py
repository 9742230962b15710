"""Chooses each sequence's next token from the model's logits.

Randomness is keyed by position: a token depends on the seed of its choice, on its position (prompt
and output counted together), and on its logits. So a request with a seed gives the same tokens
beside any other requests. A request that is frozen, recomputed, or sent again with its tokens so
far as part of the prompt continues as if nothing had happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

TokenId: TypeAlias = Annotated[int, Meta(ge=0)]

# Below this temperature the likeliest token is taken, as in vLLM.
GREEDY_BELOW: Final = 1e-5
_MASK64: Final = (1 << 64) - 1
# The constants of SplitMix64 (Steele, Lea and Flood, 2014).
_STEP: Final = 0x9E3779B97F4A7C15
_MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT: Final = 31
_UNIFORM_BITS: Final = 48


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says how to choose tokens and when to stop. Names and meanings are vLLM's.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: samples only from the likeliest tokens that together have this probability.
        top_k: samples only from that many likeliest tokens; 0 or -1: from the whole vocabulary.
        seed: the seed of the request; None: a random one.
        n: how many outputs to generate for the prompt.
        max_tokens: the limit of output tokens; None: as many as the model's length leaves.
        min_tokens: the output does not end before it has that many tokens.
        stop_token_ids: tokens that end the output, besides the model's own.
        ignore_eos: True: the model's own end-of-sequence tokens don't end the output.
        logprobs: None returns no log-probabilities, 0 or 1 that of each sampled token. As by
            default in vLLM, they are *raw*: of the model's own distribution. Tokens are sampled
            from the same distribution only at temperature 1, without ``top_k`` and ``top_p``.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None

    @property
    def stops(self) -> tuple[int, ...]:
        """The request's ``stop_token_ids``; empty if there are none."""
        return self.stop_token_ids or ()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without randomness."""
        return self.temperature < GREEDY_BELOW


def choice_seed(seed: int, index: int) -> int:
    """Returns the 64-bit seed of one choice of a request.

    As in vLLM, choice ``index`` of a request with seed ``seed`` gives the same tokens as a request
    for one choice with seed ``seed + index``.

    Args:
        index: the choice's number, from 0.
    """
    only = np.array([(seed + index) & _MASK64], np.uint64)
    return int(_outputs(only, np.zeros_like(only))[0])


class SamplingBatch:
    """Samples the next tokens of one batch of sequences.

    The object holds the sequences' parameters as tensors; a changed batch needs a new object.

    Args:
        seeds: each sequence's seed, from :func:`choice_seed`.

    Attributes:
        wants_logprobs: whether any of the sequences needs log-probabilities.
    """

    def __init__(
        self, params: Sequence[SamplingParams], seeds: Sequence[int], vocab_size: int
    ) -> None:
        drawn = [row for row, p in enumerate(params) if not p.greedy]
        cut = [row for row in drawn if _cuts(params[row], vocab_size)]
        self._drawn = torch.tensor(drawn, dtype=torch.long)
        self._temperature = torch.tensor([params[row].temperature for row in drawn])[:, None]
        self._seeds = np.array([seeds[row] for row in drawn], dtype=np.uint64)
        self._cut = torch.tensor([drawn.index(row) for row in cut], dtype=torch.long)
        self._top_k = torch.tensor(
            [k if 0 < (k := params[row].top_k) < vocab_size else vocab_size for row in cut]
        )[:, None]
        # Above any sum of probabilities where top_p cuts nothing.
        self._top_p = torch.tensor([p if (p := params[row].top_p) < 1 else 2.0 for row in cut])[
            :, None
        ]
        self.wants_logprobs = any(p.logprobs is not None for p in params)

    def sample(self, logits: Tensor, counts: Sequence[int]) -> list[int]:
        """Returns the next token of each sequence.

        Args:
            logits: [n, vocab], float32.
            counts: how many tokens each sequence has, prompt and output; they key the randomness.
        """
        tokens = logits.argmax(-1)
        if len(self._drawn):
            everyone = len(self._drawn) == len(tokens)
            scores = logits if everyone else logits[self._drawn]
            probs = torch.softmax(scores / self._temperature, dim=-1)
            if len(self._cut):
                probs[self._cut] = _cut(probs[self._cut], self._top_k, self._top_p)
            count = np.asarray(counts, dtype=np.uint64)
            uniform = uniforms(self._seeds, count if everyone else count[self._drawn.numpy()])
            tokens[self._drawn] = _draw(probs, torch.from_numpy(uniform))
        chosen: list[int] = tokens.tolist()
        return chosen


def raw_logprobs(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Returns the log-probability of each sequence's token in the model's own distribution.

    Args:
        logits: [n, vocab], float32.
        tokens: one token for each of the ``n`` rows.
    """
    index = torch.tensor(tokens)[:, None]
    picked = logits.gather(1, index).squeeze(1) - logits.logsumexp(-1)
    values: list[float] = picked.tolist()
    return values


def uniforms(
    seeds: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Returns a pseudo-random number in [0, 1) for each pair of seed and count.

    Args:
        seeds: [n].
        counts: [n]. The same seed and count give the same number.
    """
    bits = _outputs(seeds, counts) >> np.uint64(64 - _UNIFORM_BITS)
    return bits.astype(np.float64) * 2.0**-_UNIFORM_BITS


def _outputs(
    seeds: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Returns SplitMix64's ``count``-th output for each seed."""
    state = seeds + (counts + np.uint64(1)) * np.uint64(_STEP)
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state ^= state >> np.uint64(_LAST_SHIFT)
    return state


def _cuts(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1 or 0 < params.top_k < vocab_size


def _cut(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sets the probabilities that top-k, then top-p, exclude to 0, without renormalising."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(probs.shape[-1]) >= top_k, 0.0)
    ranked /= ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    kept = ranked.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, kept)


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Returns the token at which the running sum of ``probs`` passes ``uniform`` * total.

    Double precision keeps the width of a token of probability zero at zero. Logits that are not
    numbers give the last token, without a crash.
    """
    sums = probs.double().cumsum(-1)
    target = uniform[:, None] * sums[:, -1:]
    drawn = torch.searchsorted(sums, target, right=True).squeeze(1)
    return drawn.clamp_(max=probs.shape[-1] - 1)
