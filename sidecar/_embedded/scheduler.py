"""Decides which sequences run, and computes one token of each per step.

All of it runs in the core's thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from bus.rejection import closed_message
from sidecar._embedded.requests import Delta, GenerationRequest, Sequence, sequences_of
from sidecar._embedded.sampling import SamplingBatch, raw_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar._embedded.model import ModelRunner
    from sidecar._embedded.requests import Publish

# Padded tokens that one step may prefill; a longer prompt goes alone.
MAX_PREFILL_TOKENS: Final = 4096
_WHY_CLOSED: Final = "it has not joined its group yet, or its weights are not those of its group"


class BatchScheduler:
    """Keeps the sequences of one model, and decides which of them run.

    Args:
        slots: how many sequences may run at once.
        publish: called with the output of a step or an abort, at most once for each.
    """

    def __init__(self, model: ModelRunner, *, slots: int, publish: Publish) -> None:
        self.model = model
        self._slots = slots
        self._publish = publish
        self._waiting: deque[Sequence] = deque()
        # Row i runs in slot i of the cache.
        self._rows: list[Sequence] = []
        self._batch: SamplingBatch | None = None

    @property
    def running(self) -> int:
        """How many sequences have keys and values in the cache."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """How many sequences have not begun, or must be recomputed."""
        return len(self._waiting)

    def add(self, request: GenerationRequest) -> None:
        """Queues all choices of a request."""
        self._waiting.extend(sequences_of(request))

    def reject(self, request: GenerationRequest) -> None:
        """Ends a request at once, because admission is closed."""
        self._end(sequences_of(request), closed=True)

    def step(self, *, admit: bool, version: int) -> None:
        """Computes one step, in which every running sequence gets a token.

        There must be a sequence to run.

        Args:
            admit: whether waiting sequences may begin in this step.
            version: the version of the weights, recorded with each token.
        """
        tokens = [sequence.tokens[-1] for sequence in self._rows]
        positions = [len(sequence.tokens) - 1 for sequence in self._rows]
        prompts: list[list[int]] = []
        if admit and self._waiting and len(self._rows) < self._slots:
            prompts = self._begin()
        self._take(self.model.step(tokens, positions, prompts), version)

    def discard_cache(self) -> None:
        """Discards keys and values; running sequences are recomputed before others begin."""
        self._waiting.extendleft(reversed(self._rows))
        self._rows.clear()
        self._batch = None
        self.model.kv.clear()

    def abort(self, chosen: Callable[[GenerationRequest], bool], *, closed: bool = False) -> int:
        """Ends the chosen requests with the tokens they have.

        Args:
            chosen: returns whether a request is to end.
            closed: whether admission is closed. If so, requests without a token report that as the
                reason.

        Returns:
            How many requests have ended.
        """
        ended = [row for row, s in enumerate(self._rows) if chosen(s.request)]
        gone = [self._rows[row] for row in ended]
        gone += [s for s in self._waiting if chosen(s.request)]
        self._waiting = deque(s for s in self._waiting if not chosen(s.request))
        self._free(ended)
        if gone:
            self._end(gone, closed=closed)
        return len({sequence.request.id for sequence in gone})

    def _end(self, sequences: list[Sequence], *, closed: bool) -> None:
        for sequence in sequences:
            sequence.finish_reason = "abort"
            if closed and not sequence.output_len:
                sequence.stop_reason = closed_message(_WHY_CLOSED)
        self._publish([sequence.delta(fresh=0) for sequence in sequences])

    def _begin(self) -> list[list[int]]:
        """Moves waiting sequences into free slots, and returns their tokens."""
        first = len(self._rows)
        longest = 0
        while self._waiting and len(self._rows) < self._slots:
            longest = max(longest, len(self._waiting[0].tokens))
            begun = len(self._rows) - first
            if begun and (begun + 1) * longest > MAX_PREFILL_TOKENS:
                break
            self._rows.append(self._waiting.popleft())
        self._batch = None
        return [sequence.tokens for sequence in self._rows[first:]]

    def _take(self, logits: torch.Tensor, version: int) -> None:
        """Samples from ``logits`` [rows, vocab], and frees the slots of ended sequences."""
        rows = self._rows
        if self._batch is None:
            self._batch = SamplingBatch(
                [sequence.request.params for sequence in rows],
                [sequence.seed for sequence in rows],
                self.model.config.vocab_size,
            )
        allowed = _without_banned(logits, rows)
        tokens = self._batch.sample(allowed, [len(sequence.tokens) for sequence in rows])
        logprobs: list[float | None] = [None] * len(rows)
        if self._batch.wants_logprobs:
            logprobs = list(raw_logprobs(logits, tokens))
        deltas: list[Delta] = []
        ended: list[int] = []
        for row, (sequence, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            wanted = sequence.request.params.logprobs is not None
            sequence.append(token, logprob if wanted else None, version)
            if sequence.finish_reason:
                ended.append(row)
            if sequence.finish_reason or sequence.request.stream:
                deltas.append(sequence.delta(fresh=1))
        if ended:
            self._free(ended)
        if deltas:
            self._publish(deltas)

    def _free(self, ended: list[int]) -> None:
        """Removes ended sequences from the batch, and moves the last one into each gap."""
        for row in reversed(ended):
            last = self._rows.pop()
            if row < len(self._rows):
                self._rows[row] = last
                self.model.kv.move(len(self._rows), row, len(last.tokens) - 1)
        self._batch = None


def _without_banned(logits: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
    """Returns ``logits`` with tokens that may not be sampled yet at minus infinity."""
    banned = [(row, token) for row, s in enumerate(rows) for token in s.banned]
    if not banned:
        return logits
    index, tokens = zip(*banned, strict=True)
    allowed = logits.clone()
    allowed[torch.tensor(index), torch.tensor(tokens)] = float("-inf")
    return allowed
