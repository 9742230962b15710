"""The verifiable toy task: write the prompt's symbols in ascending order, then stop."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PAD, BOS, EOS, SEP = 0, 1, 2, 3
FIRST_SYMBOL = 4


@dataclass(frozen=True)
class SortTask:
    """Sort between ``min_len`` and ``max_len`` distinct symbols; lengths in tokens.

    A prompt is BOS, the shuffled symbols, SEP; the answer is the same symbols in ascending
    token order, then EOS. Generation is expected to behave like vLLM's: it stops with EOS
    (kept as the last response token) or after ``max_tokens`` tokens.
    """

    min_len: int = 8
    max_len: int = 8
    symbols: int = 12
    distinct: bool = True
    slack: int = 1

    @property
    def max_tokens(self) -> int:
        return self.max_len + 1 + self.slack

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        n = rng.randint(self.min_len, self.max_len)
        pool = range(FIRST_SYMBOL, FIRST_SYMBOL + self.symbols)
        picked = rng.sample(pool, n) if self.distinct else rng.choices(pool, k=n)
        return (BOS, *picked, SEP)


def reward(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> float:
    target = [*sorted(t for t in prompt_ids if t >= FIRST_SYMBOL), EOS]
    hits = sum(a == b for a, b in zip(response_ids, target))
    return hits / max(len(target), len(response_ids))
