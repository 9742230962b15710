"""Results of rollouts: tokens, with the engine and the weight version of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens of a choice that one engine sampled with one version of the weights.

    Attributes:
        version: the version; None if the engine died before it reported it.
        start: the first token.
        end: the token after the last one.
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
        tokens: how many new tokens it gave.
        ended_by: the finish reason, or ``abort`` (the engine ended it: a pause, a quarantine),
            ``rejected`` (the engine took no requests), ``unreachable``, ``died``, ``broken`` (its
            answer made no sense), ``stalled`` (no token for too long), ``unfetched`` (it could not
            fetch what a prefill engine had computed).
    """

    engine: str
    tokens: int
    ended_by: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the ``n`` answers to a prompt.

    Attributes:
        token_ids: without the prompt.
        logprobs: of each token, as its engine reported it when it was sampled; None if the sampling
            parameters ask for none.
        text: of all tokens, up to the stop string; None without a tokenizer.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the token of ``stop_token_ids``, or the string of ``stop``, that ended it; None
            for the model's own end of sequence, and for ``length``.
        spans: in order; they cover each token once.
        attempts: in order; more than one if the request went on elsewhere.
        inexact: why the tokens may differ from those of a request that was not interrupted; empty
            if they do not.
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


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request: ``n`` choices, in the order of their indexes."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class ChatCompletion(Completion):
    """A completion with the message of each choice.

    A message has ``role``, ``content``, and ``tool_calls`` and ``reasoning`` if engines parse them.
    """

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of choice ``index``, or its end, or both.

    ``version`` is as in :class:`Span`; it is also None if the engine reports it only at the end,
    with the :class:`Completion`.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    version: int | None
    engine: str
    finish_reason: str | None
