"""Waves of data-parallel groups, between the broker and their coordinators."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages.bounds import Count, Name, ShortText


@dataclass(frozen=True, slots=True)
class FirstReq:
    """Rank ``rank`` of an idle DP group got a request; ``wave`` is the one to start."""

    dp_group: Name
    rank: Count
    wave: Count


@dataclass(frozen=True, slots=True)
class FirstReqHeld:
    """Kept until the DP group may run again; ``reason`` says why not now."""

    dp_group: Name
    wave: Count
    reason: ShortText


@dataclass(frozen=True, slots=True)
class StartDpWave:
    """Every rank but ``excluded`` (none, if it is None) joins the wave, with dummy
    batches until all are idle."""

    dp_group: Name
    wave: Count
    excluded: Count | None


@dataclass(frozen=True, slots=True)
class WaveStarted:
    """``local``: decided without the broker, which had not answered."""

    dp_group: Name
    wave: Count
    local: bool


@dataclass(frozen=True, slots=True)
class WaveComplete:
    dp_group: Name
    wave: Count
