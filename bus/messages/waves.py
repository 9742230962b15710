"""Waves of data-parallel groups, between the broker and their coordinators."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages.types import Count, Name, ShortText


@dataclass(frozen=True, slots=True)
class FirstReq:
    """Rank ``rank`` of an idle DP group got a request; ``wave`` is the one to start.

    Only where front ends wake their group (vLLM 0.32, the embedded engine). Where engines start
    waves by themselves (vLLM 0.33), WAVE_STARTED names the rank, and nothing is asked.
    """

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
    """A wave runs. Its coordinator tells the broker; it does not ask.

    ``local``: the coordinator decided a FIRST_REQ by itself, because the broker had not answered.
    ``rank``: the rank that began the wave with its first request. Rank 0 also reports a wave
    that begins with a resume. None: an older coordinator, which does not name the rank.
    """

    dp_group: Name
    wave: Count
    local: bool
    rank: Count | None = None


@dataclass(frozen=True, slots=True)
class WaveComplete:
    dp_group: Name
    wave: Count
