"""Messages of the canary: fixed greedy probes of a finished update, before its commit."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

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


class Probe(Message, frozen=True):
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


class ProbeResult(Struct, frozen=True):
    """The result of one prompt: the generated tokens, and the log-probability of each."""

    tokens: Annotated[tuple[Count, ...], Meta(max_length=MAX_PROBE_TOKENS)]
    logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_PROBE_TOKENS)]


ProbeResults = Annotated[tuple[ProbeResult, ...], Meta(max_length=MAX_PROBES)]


class Probed(Message, frozen=True):
    """Engine to broker: one result per prompt. ``duration_ms``: how long all probes took."""

    update_id: UpdateId
    results: ProbeResults
    duration_ms: float


class EngineProbes(Struct, frozen=True):
    """The probe results of one engine."""

    engine: ShortText
    results: ProbeResults


class ProbeReport(Message, frozen=True):
    """Broker to trainer: the probe results of every engine in the update.

    Attributes:
        update_id: the update.
        version: the version that the update will have.
        engines: the results by engine. The trainer compares them.
        excluded: the engines that dropped out of the update, and have no results.
        duration_ms: how long the probes took until the last engine answered.
    """

    update_id: UpdateId
    version: Serial
    engines: Annotated[tuple[EngineProbes, ...], Meta(max_length=MAX_PROBED)]
    excluded: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]
    duration_ms: float


class Differing(Struct, frozen=True):
    """An engine that failed the canary, and how.

    Attributes:
        engine: the engine's name.
        probe: the number of the first probe, from 0, whose result differs from the expected one.
        expected: the expected result, as text.
        found: the engine's result, as text.
    """

    engine: ShortText
    probe: Count
    expected: ShortText
    found: ShortText
