"""The canary: fixed greedy probes of an update that is finished, before it is committed."""

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
    Prompts,
    Serial,
    ShortText,
    UpdateId,
)


@dataclass(frozen=True, slots=True)
class Probe:
    """``prompts`` are token ids; each gets ``max_tokens``, past any end of sequence. ``salt`` keeps
    them apart from what prefix caches hold: it is of this update alone."""

    update_id: UpdateId
    prompts: Prompts
    max_tokens: MaxTokens
    salt: ShortText


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one prompt gave: greedy tokens, and the log-probability of each."""

    tokens: Annotated[tuple[Count, ...], Meta(max_length=MAX_PROBE_TOKENS)]
    logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_PROBE_TOKENS)]


ProbeResults = Annotated[tuple[ProbeResult, ...], Meta(max_length=MAX_PROBES)]


@dataclass(frozen=True, slots=True)
class Probed:
    """An engine's answer, one result per prompt."""

    update_id: UpdateId
    results: ProbeResults
    duration_ms: float


@dataclass(frozen=True, slots=True)
class EngineProbes:
    engine: ShortText
    results: ProbeResults


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What every engine that is left in the update has answered. ``excluded`` fell out."""

    update_id: UpdateId
    version: Serial
    engines: Annotated[tuple[EngineProbes, ...], Meta(max_length=MAX_PROBED)]
    excluded: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]
    duration_ms: float


@dataclass(frozen=True, slots=True)
class Differing:
    """An engine that is not to be committed: on which probe (from 0) it gave something else, what
    was expected, and what was found."""

    engine: ShortText
    probe: Count
    expected: ShortText
    found: ShortText
