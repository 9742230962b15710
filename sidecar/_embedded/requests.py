"""Requests of the embedded engine, and their output."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from sidecar._embedded.sampling import SamplingParams, choice_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.errors import EngineError


FinishReason: TypeAlias = Literal["stop", "length", "abort"]

Publish: TypeAlias = "Callable[[list[Delta]], None]"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The version of the weights that has sampled a range of output tokens.

    Attributes:
        version: the version.
        start: index of the range's first output token.
        end: index after its last one.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New output tokens of one choice of a request, or its end, or both.

    Attributes:
        request_id: the engine's id of the request.
        index: the choice's number, from 0.
        token_ids: the new tokens.
        logprobs: one log-probability for each of ``token_ids``; None if none were requested.
        finish_reason: set in the choice's last delta.
        stop_reason: the token of ``stop_token_ids`` that ended the choice, or a text if admission
            is closed; else None.
        weight_versions: which version has sampled which tokens, over the whole output so far.
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
    """A request, as the core gets it: a prompt, and how to continue it.

    Attributes:
        id: the engine's id of the request.
        prompt: token ids.
        params: how to choose tokens, and when to stop.
        seed: the caller's seed, or a random one if the caller gave none.
        max_tokens: the limit of output tokens; prompt and output together must fit the longest
            sequence that the model can have.
        eos_token_ids: the tokens that end a sequence of this model.
        stream: True: every token is published at once; False: each choice when it has ended.
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
    """One choice of a request, while it runs.

    Attributes:
        request: the request.
        index: the choice's number, from 0.
        seed: the choice's own seed.
        tokens: the prompt, then the output so far.
        logprobs: of the output tokens, if they were requested.
        version_starts: pairs of a version and the index of the first output token that it has
            sampled.
        finish_reason: why the choice has ended; None while it runs.
        stop_reason: as in :class:`Delta`.
    """

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
        """The model's end-of-sequence tokens; none if the request ignores them."""
        return () if self.request.params.ignore_eos else self.request.eos_token_ids

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that must not be sampled now, because they would end the output too early.

        These are all tokens that end the sequence, until it has ``min_tokens``.
        """
        if self.output_len >= self.request.params.min_tokens:
            return ()
        return (*self.request.params.stops, *self.ends)

    def append(self, token: int, logprob: float | None, version: int) -> None:
        """Appends a sampled token; sets :attr:`finish_reason` if it is the last one.

        Args:
            logprob: its log-probability; None if none were requested.
            version: the version of the weights that sampled it.
        """
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
        """Returns which version has sampled which output tokens, without gaps."""
        ends = [start for _, start in self.version_starts[1:]] + [self.output_len]
        return tuple(
            VersionSpan(version, start, end)
            for (version, start), end in zip(self.version_starts, ends, strict=False)
        )

    def delta(self, fresh: int) -> Delta:
        """Returns the newest output tokens, to be published.

        Args:
            fresh: how many tokens are new. If the request doesn't stream, all count as new.
        """
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
    """Returns a new :class:`Sequence` for each choice of a request."""
    return [
        Sequence(request, index, choice_seed(request.seed, index), list(request.prompt))
        for index in range(request.params.n)
    ]


class Generation:
    """An async iterator over the output of one request, for one consumer.

    A consumer that stops early calls :meth:`abort`.

    Args:
        request_id: the engine's id of the request.
        choices: how many choices the request has; the iteration ends when all have ended.
        abort: makes the engine end the request of this id.

    Attributes:
        done: set when no more output will come; the consumer may still have some to read.
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
        await self._wait()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def ready(self) -> list[Delta]:
        """Waits for new output, and returns all that has arrived; empty at the end.

        Raises:
            EngineDead: the engine crashed.
        """
        await self._wait()
        deltas = list(self._ready)
        self._ready.clear()
        return deltas

    async def outputs(self) -> list[Delta]:
        """Waits for the end, and returns the whole output of each choice, in their order.

        Raises:
            EngineDead: the engine crashed.
        """
        merged: dict[int, Delta] = {}
        async for delta in self:
            before = merged.get(delta.index)
            merged[delta.index] = delta if before is None else _joined(before, delta)
        return [merged[index] for index in sorted(merged)]

    def abort(self) -> None:
        """Ends the request with the tokens it has, unless it has ended."""
        if not self.done.is_set():
            self._abort(self.request_id)

    def push(self, delta: Delta) -> None:
        """Adds output for the consumer. The engine calls this in the event loop.

        Args:
            delta: new tokens, and whether the request has ended.
        """
        self._ready.append(delta)
        if delta.finish_reason:
            self._open -= 1
            if not self._open:
                self.done.set()
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """Ends the iteration with an error. The engine calls this in the event loop."""
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
