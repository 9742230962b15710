"""Requests of the embedded engine, for the core and for callers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from sidecar.embedded.sampling import SamplingParams, choice_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.errors import EngineError


FinishReason: TypeAlias = Literal["stop", "length", "abort"]

Publish: TypeAlias = "Callable[[list[Delta]], None]"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens ``start`` to ``end`` (exclusive) were sampled under ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice of a request, or its end, or both.

    Attributes:
        logprobs: one for each of ``token_ids``; None if none were requested.
        finish_reason: set in the choice's last delta.
        stop_reason: the token of ``stop_token_ids`` that ended the choice, or a text if admission
            is closed; else None.
        weight_versions: spans of the whole output so far.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and its parameters.

    Attributes:
        seed: the caller's seed, or a random one.
        max_tokens: the limit of output tokens, at most what the model's length leaves.
        stream: whether each token makes a delta; otherwise each choice makes one at its end.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    stream: bool


@dataclass(slots=True)
class Sequence:
    """One choice of a request: its tokens, prompt first, and where each version began."""

    request: GenerationRequest
    index: int
    seed: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def output_len(self) -> int:
        """The number of output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end the sequence for this model; none if the request ignores them."""
        return () if self.request.params.ignore_eos else self.request.eos_token_ids

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that may not be sampled yet: the ends of sequence, before ``min_tokens``."""
        if self.output_len >= self.request.params.min_tokens:
            return ()
        return (*self.request.params.stops, *self.ends)

    def append(self, token: int, logprob: float | None, version: int) -> None:
        """Appends a sampled token, and ends the sequence if it is the last."""
        starts = self.version_starts
        if not starts or starts[-1][0] != version:
            starts.append((version, self.output_len))
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        params = self.request.params
        if token in self.ends:
            self.finish_reason = "stop"
        elif token in params.stops:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.output_len >= self.request.max_tokens:
            self.finish_reason = "length"

    def spans(self) -> tuple[VersionSpan, ...]:
        """Returns contiguous spans over the whole output."""
        ends = [start for _, start in self.version_starts[1:]] + [self.output_len]
        return tuple(
            VersionSpan(version, start, end)
            for (version, start), end in zip(self.version_starts, ends, strict=False)
        )

    def delta(self, fresh: int) -> Delta:
        """Returns the last ``fresh`` tokens as a delta; all if the request doesn't stream."""
        count = fresh if self.request.stream else self.output_len
        wanted = self.request.params.logprobs is not None
        return Delta(
            self.request.id,
            self.index,
            tuple(self.tokens[len(self.tokens) - count :]),
            tuple(self.logprobs[len(self.logprobs) - count :]) if wanted else None,
            self.finish_reason,
            self.stop_reason,
            self.spans(),
        )


def sequences_of(request: GenerationRequest) -> list[Sequence]:
    """Returns one sequence for each choice of a request."""
    return [
        Sequence(request, index, choice_seed(request.seed, index), list(request.prompt))
        for index in range(request.params.n)
    ]


class Generation:
    """An async iterator over the deltas of one request, for one consumer.

    A consumer that stops early calls :meth:`abort`.

    Args:
        request_id: the engine's id of the request.
        choices: how many choices will end.
        abort: asks the engine to end the request.

    Attributes:
        done: set when no more deltas will come; some may not have been read yet.
    """

    def __init__(self, request_id: str, choices: int, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.done = asyncio.Event()
        self._open = choices
        self._abort = abort
        self._ready: deque[Delta] = deque()
        self._news = asyncio.Event()
        self._error: EngineError | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        """Returns the next delta.

        Raises:
            EngineDead: the engine crashed.
        """
        if not self._ready:
            await self._wait()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def ready(self) -> list[Delta]:
        """Waits for a delta, and returns all that have arrived; none at the end.

        Raises:
            EngineDead: the engine crashed.
        """
        if not self._ready:
            await self._wait()
        deltas = list(self._ready)
        self._ready.clear()
        return deltas

    async def outputs(self) -> list[Delta]:
        """Reads to the end, and returns one whole delta for each choice, in order.

        Raises:
            EngineDead: the engine crashed.
        """
        merged: dict[int, Delta] = {}
        async for delta in self:
            before = merged.get(delta.index)
            merged[delta.index] = delta if before is None else _joined(before, delta)
        return [merged[index] for index in sorted(merged)]

    def abort(self) -> None:
        """Ends the request, unless it has ended."""
        if not self.done.is_set():
            self._abort(self.request_id)

    def push(self, delta: Delta) -> None:
        """Adds a delta; the engine calls this in the loop."""
        self._ready.append(delta)
        if delta.finish_reason:
            self._open -= 1
            if not self._open:
                self.done.set()
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """Ends the iteration with an error; the engine calls this in the loop."""
        self._error = error
        self.done.set()
        self._news.set()

    async def _wait(self) -> None:
        """Waits for a delta or the end."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self.done.is_set():
                return
            self._news.clear()
            await self._news.wait()


def _joined(first: Delta, second: Delta) -> Delta:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return replace(second, token_ids=first.token_ids + second.token_ids, logprobs=logprobs)
