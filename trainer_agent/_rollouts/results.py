"""Results of rollouts: tokens, with the engine and the weight version of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive output tokens that one engine sampled with one version of the weights.

    Attributes:
        version: the version; None if the engine died before it reported the version.
        start: the index of the first token.
        end: the index after the last token.
        engine: the engine's name.
    """

    version: int | None
    start: int
    end: int
    engine: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request to one engine.

    Attributes:
        engine: the engine's name.
        tokens: how many new tokens the engine gave.
        ended_by: the finish reason, or ``abort`` (the engine ended it, because of a pause or
            quarantine), ``rejected`` (the engine admitted no requests), ``unreachable``, ``died``,
            ``broken`` (the answer was invalid), ``stalled`` (no token for too long), ``unfetched``
            (the engine could not fetch the keys and values from a prefill engine), ``unknown`` (the
            engine does not have the model; another engine may).
    """

    engine: str
    tokens: int
    ended_by: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the ``n`` answers to a prompt.

    Attributes:
        index: the choice's index, from 0 to ``n - 1``.
        token_ids: the output tokens, without the prompt.
        logprobs: the log-probability of each token, as reported by the engine that sampled the
            token; None if the sampling parameters request no log-probabilities.
        text: the text of all tokens, up to the stop string, or to the token that ended the choice;
            None without a tokenizer.
        finish_reason: ``stop``, ``length``, ``abort`` (by
            :meth:`~trainer_agent._rollouts.client.RolloutClient.abort_requests`), or another reason
            of the engine's own, such as ``repetition`` (of ``repetition_detection``).
        stop_reason: the token of ``stop_token_ids``, or the string of ``stop``, that ended the
            choice; None for the model's own end of sequence, and for ``length``.
        spans: the spans in order, which cover each token once.
        attempts: the attempts in order; several if the request was interrupted.
        inexact: why the tokens may differ from those of an uninterrupted request; empty: they are
            the same.
        top_logprobs: for each position, the log-probabilities of the likeliest tokens, by token
            id; None if the parameter ``logprobs`` is None or 0.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    spans: tuple[Span, ...]
    attempts: tuple[Attempt, ...]
    inexact: tuple[str, ...]
    top_logprobs: tuple[Mapping[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request.

    Attributes:
        request_id: the request's id in engines' logs.
        prompt_token_ids: the token ids of the prompt.
        choices: the ``n`` choices, in the order of their indexes.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class ChatCompletion(Completion):
    """A completion with the message of each choice.

    Attributes:
        messages: the message of each choice, with ``role``, ``content``, and ``tool_calls`` and
            ``reasoning`` if engines parse these.
    """

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of a choice, or its end, or both, as a stream yields them.

    Attributes:
        index: the index of the choice.
        token_ids: the new tokens.
        logprobs: the log-probability of each new token; None if the sampling parameters request no
            log-probabilities.
        version: the version that sampled the last token; None if the version is unknown, or if the
            engine reports versions only at the end. The :class:`Completion` then has the versions.
        engine: the engine's name.
        finish_reason: as in :class:`Choice` if the choice has ended; else None.
        top_logprobs: as in :class:`Choice`, for the new tokens.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    version: int | None
    engine: str
    finish_reason: str | None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
