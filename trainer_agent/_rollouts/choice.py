"""Collects the tokens of one choice of a request, over all attempts."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from trainer_agent._rollouts.attempt import INTERRUPTED, Cut
from trainer_agent._rollouts.results import Attempt, Choice, Span, TokenDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.messages import RequestLimits
    from trainer_agent._rollouts.attempt import Piece, PieceSpan
    from trainer_agent._rollouts.request import RolloutRequest


_CHARACTER: Final = 4  # the most tokens of one character, which has up to 4 bytes in UTF-8
_PENDING: Final = 3 * _CHARACTER
_INVALID: Final = "\N{REPLACEMENT CHARACTER}"
# Delays between the starts of brief attempts, for example at an engine that ends each attempt after
# one token.
_PAUSE_S: Final = 0.0125
_LONGEST_PAUSE_S: Final = 1.0
_DOUBLINGS: Final = 10


class Tokenizer(Protocol):
    """The only method of a tokenizer that the client needs, as in transformers."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Returns the text of tokens."""


class ChoiceState:
    """Collects the tokens of one choice over all attempts.

    Args:
        request: the request of the choice.
        index: the index of the choice.
        tokenizer: decodes the tokens to text, which is searched for stop strings; None: no text.
        limits: the limits of the engines that may run the request.

    Attributes:
        token_ids: the tokens so far.
        failures: how many attempts in a row have failed without a new token.
        restarts: how often the choice has restarted from the prompt.
        next_s: when the next attempt may begin, in seconds.
        length: the most tokens that prompt and output may have together.
        done: whether the choice is complete.
        attempts: the number of attempts that have ended.
        gained: the number of tokens that the last attempt has added.
        has_ended: whether the current attempt has ended, by the engine or a stop string.
    """

    def __init__(
        self,
        request: RolloutRequest,
        index: int,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.failures = 0
        self.restarts = 0
        self.next_s = 0.0
        self.done = False
        self._request = request
        self._tokenizer = tokenizer
        self._vocab_size = limits.vocab_size
        self._budget = request.budget(limits)
        self.length = len(request.prompt) + (self._budget or 0)
        self._brief = 0  # attempts in a row that were brief
        self._logprobs: list[float] = []
        self._tops: list[dict[int, float]] = []
        self._spans: list[Span] = []
        self._attempts: list[Attempt] = []
        self._inexact: list[str] = []
        self._finish = ""  # of the current attempt
        self._stop: int | str | None = None
        self._stop_chars = 0  # from the start of the stop string to the end of the text
        self._begun = 0  # tokens before the current attempt
        self._wire_spans: list[PieceSpan] = []
        self._stop_search = _StopSearch(tokenizer) if tokenizer and request.stops else None

    @property
    def attempts(self) -> int:
        return len(self._attempts)

    @property
    def gained(self) -> int:
        return self._attempts[-1].tokens

    @property
    def has_ended(self) -> bool:
        return bool(self._finish)

    def begin_attempt(self, limits: RequestLimits) -> RequestLimits:
        """Begins an attempt on an engine with ``limits``; returns the limits of the attempt."""
        self._vocab_size = limits.vocab_size
        return replace(limits, max_model_len=self.length)

    def pace(self, begun_s: float, ended_s: float) -> None:
        """Delays the next attempt if the last attempts were brief; the delay doubles each time."""
        self._brief = self._brief + 1 if ended_s - begun_s < _LONGEST_PAUSE_S else 0
        if self._brief > 1:
            pause_s = _PAUSE_S * 2.0 ** min(self._brief, _DOUBLINGS)
            self.next_s = begun_s + min(_LONGEST_PAUSE_S, pause_s)

    def take(self, piece: Piece, engine: str) -> TokenDelta | None:
        """Adds a piece of an engine's answer.

        Args:
            piece: the piece.
            engine: the engine's name.

        Returns:
            The new tokens, or the choice's end, for the caller; None if there is nothing new.

        Raises:
            Cut: the piece is invalid.
        """
        fresh = piece.token_ids or []
        if self._finish:
            if self._finish == "stop" and isinstance(self._stop, str):
                return None  # stop strings are not sent to the engine, so it generates on
            raise Cut("broken", "the answer goes on after its end")
        if fresh and self._vocab_size and not 0 <= min(fresh) <= max(fresh) < self._vocab_size:
            raise Cut("broken", f"tokens {fresh[:8]} exceed a vocabulary of {self._vocab_size}")
        if self._budget is not None and len(self.token_ids) + len(fresh) > self._budget:
            raise Cut("broken", f"the answer has more than {self._budget} tokens")
        logprobs = tops = None
        if self._request.params.logprobs is not None:
            content = piece.logprobs.content if piece.logprobs else []
            logprobs = [each.logprob for each in content]
            if len(logprobs) != len(fresh):
                raise Cut("broken", f"{len(logprobs)} log-probabilities for {len(fresh)} tokens")
            if self._request.params.logprobs:
                tops = [each.likeliest() for each in content]
                self._tops += tops
        if piece.weight_versions:
            _check_spans(piece.weight_versions, len(self.token_ids) + len(fresh) - self._begun)
            self._wire_spans = piece.weight_versions
        self.token_ids += fresh
        self._logprobs += logprobs or ()
        if piece.finish_reason:
            self._finish, self._stop = piece.finish_reason, piece.stop_reason
        if self._stop_search is not None and fresh:
            fresh = self._search_stop(fresh)
        if fresh:
            self.failures = 0
        ended = self._finish if self._finish not in INTERRUPTED else None
        if not fresh and ended is None:
            return None
        return TokenDelta(
            self.index,
            tuple(fresh),
            tuple(logprobs[: len(fresh)]) if logprobs is not None else None,
            _number(self._wire_spans[-1].version) if self._wire_spans else None,
            engine,
            ended,
            tuple(tops[: len(fresh)]) if tops is not None else None,
        )

    def end_attempt(self, engine: str, cut: str = "") -> None:
        """Ends the current attempt, and records its tokens and their versions.

        Args:
            engine: the engine's name.
            cut: why the attempt ended early, as in :attr:`Attempt.ended_by`; empty: the answer was
                complete.

        Raises:
            Cut: the answer has ended without a finish reason.
        """
        tokens = len(self.token_ids) - self._begun
        ended_by = self._finish or cut
        self._attempts.append(Attempt(engine, tokens, ended_by or "broken"))
        spans = [
            Span(_number(each.version), self._begun + each.start, self._begun + each.end, engine)
            for each in self._wire_spans
            if each.start < tokens
        ]
        covered = min(spans[-1].end, len(self.token_ids)) if spans else self._begun
        if spans and spans[-1].end > covered:  # a stop string has cut tokens off
            spans[-1] = Span(spans[-1].version, spans[-1].start, covered, engine)
        if covered < len(self.token_ids):
            spans.append(Span(None, covered, len(self.token_ids), engine))
        self._spans += spans
        if ended_by and self._finish in INTERRUPTED and len(self.token_ids) == self._budget:
            self._finish = "length"
        self.done = self._finish not in INTERRUPTED
        finish, self._finish = self._finish, ""
        self._begun, self._wire_spans = len(self.token_ids), []
        if self.done:
            self._finish = finish
        elif ended_by not in ("abort", "rejected", "unreachable", "unknown") and not tokens:
            self.failures += 1
        if not self.done and not ended_by:
            raise Cut("broken", f"the answer has no finish reason for choice {self.index}")

    def mark_inexact(self, reasons: Sequence[str]) -> None:
        """Records why tokens from now on may differ from those of an uninterrupted answer."""
        self._inexact += [each for each in reasons if each not in self._inexact]

    def restart(self) -> None:
        """Drops all tokens, so that the next attempt starts from the prompt."""
        self.restarts += 1
        self.token_ids.clear()
        self._logprobs.clear()
        self._tops.clear()
        self._spans.clear()
        self._begun = 0
        if self._tokenizer is not None and self._stop_search is not None:
            self._stop_search = _StopSearch(self._tokenizer)

    def result(self) -> Choice:
        """Returns the choice; its finish reason is ``abort`` if the choice is not done."""
        text = None
        if self._tokenizer is not None:
            text = self._tokenizer.decode(self.token_ids[: self._end_of_text()])
            if isinstance(self._stop, str) and self._request.stops:
                at = text.find(self._stop, max(0, len(text) - self._stop_chars))
                kept = len(self._stop) if self._request.params.include_stop_str_in_output else 0
                text = text[: at + kept] if at >= 0 else text
        return Choice(
            self.index,
            tuple(self.token_ids),
            tuple(self._logprobs) if self._request.params.logprobs is not None else None,
            text,
            self._finish or "abort",
            self._stop,
            tuple(self._spans),
            tuple(self._attempts),
            tuple(self._inexact),
            tuple(self._tops) if self._request.params.logprobs else None,
        )

    def _end_of_text(self) -> int | None:
        """Returns where the text's tokens end: before a token that ended the answer."""
        kept = isinstance(self._stop, str) or self._request.params.include_stop_str_in_output
        return -1 if self._finish == "stop" and not kept else None

    def _search_stop(self, fresh: list[int]) -> list[int]:
        """Returns the new tokens up to the end of a stop string; drops later tokens."""
        first = len(self.token_ids) - len(fresh)
        kept = self._add_to_search(fresh, first)
        if kept:
            del self.token_ids[kept:]
            del self._logprobs[kept:]
            del self._tops[kept:]
            return fresh[: kept - first]
        return fresh

    def _add_to_search(self, tokens: list[int], first: int) -> int:
        """Adds tokens to the search; bisects for the token that completes a match.

        Args:
            first: how many tokens the answer has before ``tokens``.

        Returns:
            How many tokens the answer has up to the end of a stop string; 0: no stop string.
        """
        assert self._stop_search is not None
        search = copy.copy(self._stop_search)
        found, chars = search.search(tokens, self._request.stops)
        if first + len(tokens) <= self._request.params.min_tokens:
            found = ""
        if found and len(tokens) > 1:
            half = len(tokens) // 2
            kept = self._add_to_search(tokens[:half], first)
            return kept or self._add_to_search(tokens[half:], first + half)
        self._stop_search = search
        if not found:
            return 0
        self._finish, self._stop, self._stop_chars = "stop", found, chars
        return first + 1


class GrowingText:
    """Decodes tokens to text as they arrive.

    A token may be part of a character, and its text may depend on the tokens before it. So a window
    of recent tokens is decoded with and without the new ones; the difference is their text. The
    window stays short: a character has at most four bytes, and each token has at least one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: tuple[int, ...] = ()
        self._read = 0  # tokens of the window whose text was returned

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens; returns their text, except for an incomplete character at the end."""
        self._window += tuple(tokens)
        text, end = self._tokenizer.decode(self._window), len(self._window)
        if text.endswith(_INVALID):
            text, end = self._complete(text)
            if end == self._read:
                return ""
        before = self._tokenizer.decode(self._window[: self._read])
        self._window = self._window[self._read :]
        self._read = end - self._read
        return text[len(before) :]

    def _complete(self, text: str) -> tuple[str, int]:
        """Returns the text up to the last whole character, and its number of tokens.

        Args:
            text: the text of the window. The character at its end may be incomplete.
        """
        size = len(self._window)
        for end in range(size - 1, max(self._read, size - _CHARACTER), -1):
            head = self._tokenizer.decode(self._window[:end])
            if not head.endswith(_INVALID):
                return head, end
        if size - self._read < _PENDING:
            return "", self._read
        # These bytes are not valid UTF-8. Later tokens can't change the text of any but the last
        # four.
        for end in range(size - _CHARACTER, size - 2 * _CHARACTER, -1):
            head = self._tokenizer.decode(self._window[:end])
            if text.startswith(head):
                break
        return head, end


class _StopSearch(GrowingText):
    """Finds stop strings in growing text, even across attempts. ``copy.copy`` gives a snapshot."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._tail = ""

    def search(self, tokens: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
        """Adds tokens to the text, and searches for stop strings that these complete.

        Returns:
            The first stop string, or ""; and the number of characters from its start to the end of
            the text.
        """
        seen, before = self._tail + self.add(tokens), len(self._tail)
        longest = max(map(len, stops))
        self._tail = seen[-(longest - 1) :] if longest > 1 else ""
        starts = ((seen.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops)
        at, stop = min((each for each in starts if each[0] >= 0), default=(0, ""))
        return stop, len(seen) - at


def _check_spans(spans: Sequence[PieceSpan], tokens: int) -> None:
    """Raises ``Cut`` unless spans are contiguous, from 0 to ``tokens``."""
    starts = [*(span.start for span in spans), tokens]
    ends = [0, *(span.end for span in spans)]
    if starts != ends or ends != sorted(ends):
        raise Cut("broken", f"the versions of {tokens} tokens are malformed: {spans!r:.200}")


@lru_cache(maxsize=64)
def _number(label: str | int | None) -> int | None:
    """Returns the version in an engine's label; 0 for other labels, such as vLLM's ``default``."""
    text = str(label)
    return int(text) if text.isdecimal() else None if label is None else 0
