"""Streams answers from an engine, and records when their tokens come.

An update reaches users as a gap between two tokens. So the arrival of each piece of an answer is
recorded as it is read; all tokens of a piece have the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from typing import TYPE_CHECKING, Final

import aiohttp

from bus.errors import UsageError
from lab.bench.harness import BenchFailed
from trainer_agent._rollouts.attempt import Cut, Piece, pieces

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

PROMPT_TOKENS: Final = 32
_AGAIN_S: Final = 0.05


class Streams:
    """Streams the answers of several requests, and records when their tokens come.

    Args:
        requests: how many requests there are.
        tokens: how many tokens each answer has.

    Attributes:
        came: by request, when its pieces came, in seconds on ``time.monotonic()``'s clock.
        pieces: by request, how many tokens each piece had.
        counts: by request, how many tokens have come so far.
    """

    def __init__(self, requests: int, tokens: int) -> None:
        self.came: list[list[float]] = [[] for _ in range(requests)]
        self.pieces: list[list[int]] = [[] for _ in range(requests)]
        self.counts = [0] * requests
        self._tokens = tokens
        self._changed = asyncio.Event()

    async def have(self, tokens: int) -> None:
        """Waits until every request has received at least ``tokens`` tokens."""
        while min(self.counts) < tokens:
            self._changed.clear()
            await self._changed.wait()

    async def run(self, session: aiohttp.ClientSession, url: str, index: int) -> None:
        """Sends request ``index`` to an engine, and records the whole answer.

        Raises:
            BenchFailed: the request ended without all its tokens.
        """
        async for piece in _pieces(session, url, index, self._tokens):
            count = len(piece.token_ids or ())
            if count:
                self.came[index].append(time.monotonic())
                self.pieces[index].append(count)
                self.counts[index] += count
                self._changed.set()
        if self.counts[index] != self._tokens:
            raise BenchFailed(
                f"request {index} ended with {self.counts[index]} of {self._tokens} tokens"
            )


async def _pieces(
    session: aiohttp.ClientSession, url: str, index: int, tokens: int
) -> AsyncIterator[Piece]:
    """Sends a greedy request, again if a paused engine rejects it; yields the answer's pieces."""
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": prompt_of(index), "sampling_params": sampling, "stream": True}
    while True:
        try:
            async for batch in pieces(session, url, body):
                for piece in batch:
                    yield piece
        except (Cut, UsageError) as error:
            if not isinstance(error, Cut) or error.how != "rejected":
                raise BenchFailed(f"request {index}: {error}") from error
            await asyncio.sleep(_AGAIN_S)
        else:
            return


@contextlib.asynccontextmanager
async def streaming(urls: Sequence[str], requests: int, tokens: int) -> AsyncIterator[Streams]:
    """Streams greedy requests, spread over some servers, during a block.

    Leaving the block waits until all answers, of ``tokens`` tokens each, have ended.

    Raises:
        BenchFailed: a request failed, or ended with fewer tokens.
    """
    streams = Streams(requests, tokens)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for index in range(requests):
                tasks.create_task(streams.run(session, urls[index % len(urls)], index))
            yield streams
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def greedy(url: str, tokens: int) -> list[int]:
    """Returns the tokens of a fixed prompt, from an engine that is otherwise idle.

    Engines with equal weights return equal tokens.

    Raises:
        BenchFailed: the engine did not answer.
    """
    async with aiohttp.ClientSession() as session:
        answer = [piece.token_ids or () async for piece in _pieces(session, url, 0, tokens)]
    return list(itertools.chain.from_iterable(answer))


def prompt_of(index: int) -> list[int]:
    """Returns the prompt of a request, by its number; all models have these tokens."""
    return [1 + (index * 7 + place * (index + 3)) % 13 for place in range(PROMPT_TOKENS)]


def longest_gap_ms(came: Iterable[Sequence[float]], since_s: float, until_s: float) -> float:
    """Returns the longest gap between two tokens of a request during an update, in ms.

    A gap counts if it overlaps the update. ``came`` is as in :class:`Streams`.

    Raises:
        BenchFailed: a request has no token before the update, or none after it.
    """
    longest_s = 0.0
    for times in came:
        if not times or times[0] > since_s or times[-1] < until_s:
            raise BenchFailed(
                "a request began or ended while the engine was updated: take more tokens"
            )
        longest_s = max(
            longest_s, *(b - a for a, b in itertools.pairwise(times) if a < until_s and b > since_s)
        )
    return longest_s * 1000


def gaps_ms(came: Iterable[Sequence[float]], since_s: float, until_s: float) -> list[float]:
    """Returns all gaps between two tokens of a request within a period, in ms."""
    return [
        (b - a) * 1000
        for times in came
        for a, b in itertools.pairwise(times)
        if a >= since_s and b <= until_s
    ]


def tokens_within(
    came: Iterable[Sequence[float]], pieces: Iterable[Sequence[int]], since_s: float, until_s: float
) -> float:
    """Returns how many tokens engines generated in a period.

    A piece counts for the time since the piece before it. If only a part of that time is in the
    period, only that part of its tokens counts. ``came`` and ``pieces`` are as in :class:`Streams`.
    """
    total = 0.0
    for times, counts in zip(came, pieces, strict=True):
        for (before_s, at_s), count in zip(itertools.pairwise(times), counts[1:], strict=True):
            if at_s > since_s and before_s < until_s:
                inside_s = min(at_s, until_s) - max(before_s, since_s)
                total += count * inside_s / (at_s - before_s)
    return total


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value such that ``percent`` % of the values are no larger."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
