"""Messages of the canary: fixed greedy probes of a finished update, before its commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from bus.messages.types import (
    MAX_PROBE_TOKENS,
    MAX_PROBED,
    MAX_PROBES,
    Count,
    MaxTokens,
    Message,
    Prompts,
    Serial,
    ShortText,
    UpdateId,
)


@dataclass(frozen=True, slots=True)
class Probe(Message):
    """Trainer to broker to engines: run these probes before the COMMIT.

    Attributes:
        update_id: the update.
        prompts: token ids of each prompt.
        max_tokens: how many tokens to generate per prompt, past any end-of-sequence token.
        salt: differs for each update, so that probes never match entries of prefix caches.
    """

    update_id: UpdateId
    prompts: Prompts
    max_tokens: MaxTokens
    salt: ShortText


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one prompt: greedy tokens, and the log-probability of each."""

    tokens: Annotated[tuple[Count, ...], Meta(max_length=MAX_PROBE_TOKENS)]
    logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_PROBE_TOKENS)]


ProbeResults = Annotated[tuple[ProbeResult, ...], Meta(max_length=MAX_PROBES)]


@dataclass(frozen=True, slots=True)
class Probed(Message):
    """Engine to broker: one result per prompt."""

    update_id: UpdateId
    results: ProbeResults
    duration_ms: float


@dataclass(frozen=True, slots=True)
class EngineProbes:
    """The probe results of one engine."""

    engine: ShortText
    results: ProbeResults


@dataclass(frozen=True, slots=True)
class ProbeReport(Message):
    """Broker to trainer: the results of every engine in the update; ``excluded`` dropped out."""

    update_id: UpdateId
    version: Serial
    engines: Annotated[tuple[EngineProbes, ...], Meta(max_length=MAX_PROBED)]
    excluded: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]
    duration_ms: float


@dataclass(frozen=True, slots=True)
class Differing:
    """An engine that failed the canary: its first differing probe (from 0), and what differs."""

    engine: ShortText
    probe: Count
    expected: ShortText
    found: ShortText
