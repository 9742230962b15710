"""The verifiable toy task: encipher the prompt's letters one by one, then stop.

A prompt is BOS, ``LENGTH`` letters, SEP. The answer is every letter moved ``SHIFT`` places
on round an alphabet of ``LETTERS``, then EOS. Generation is expected to behave like vLLM's:
it ends with EOS, which stays as the last response token, or after ``MAX_TOKENS`` tokens.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAD, BOS, EOS, SEP = 0, 1, 2, 3
FIRST_LETTER = 4
LETTERS = 8
LENGTH = 16
SHIFT = 3
VOCAB_SIZE = 16
"""Token ids the policy can emit; the four above the last letter are never right."""
MAX_TOKENS = LENGTH + 1
"""Response limit, in tokens: the answer's letters and its EOS."""
HELD_OUT_SEED = 20_260_000


def answer(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the correct response, including EOS; skips tokens that are not letters."""
    places = (t - FIRST_LETTER for t in prompt_ids)
    moved = (FIRST_LETTER + (p + SHIFT) % LETTERS for p in places if 0 <= p < LETTERS)
    return (*moved, EOS)


def reward(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> float:
    """Returns the share, in [0, 1], of positions where the response equals the answer.

    The positions are those of the longer of the two, so a response that is too short or too long
    gets a lower reward.
    """
    right = answer(prompt_ids)
    hits = sum(a == b for a, b in zip(response_ids, right, strict=False))
    return hits / max(len(right), len(response_ids))


@cache
def held_out(count: int = 64) -> tuple[tuple[int, ...], ...]:
    """Returns ``count`` distinct prompts, the same on every call, for evaluation only."""
    rng = random.Random(HELD_OUT_SEED)  # noqa: S311 - no secret
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[_draw(rng)] = None
    return tuple(found)


def train_prompts(seed: int) -> Iterator[tuple[int, ...]]:
    """Yields random prompts for ever, except those of the default held-out set."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    kept_back = set(held_out())
    while True:
        prompt = _draw(rng)
        if prompt not in kept_back:
            yield prompt


def _draw(rng: random.Random) -> tuple[int, ...]:
    """Returns one prompt of ``LENGTH + 2`` token ids with independent uniform letters."""
    letters = (FIRST_LETTER + rng.randrange(LETTERS) for _ in range(LENGTH))
    return (BOS, *letters, SEP)
