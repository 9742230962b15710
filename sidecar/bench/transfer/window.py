"""What happened in an engine's pause, and how much of that time was the control plane's.

The **window** is what the engine stands still for: from the first PAUSE_LOCAL to the last engine
resumed, as the broker counts it; without a bus from the post of the pause to the answer of the
resume, as the trainer counts it.

In it the engine **works** while it pauses, starts, receives, loads, finishes, takes its new version
or resumes, and the trainer while it puts or sends a chunk. All the rest is the **control plane**'s:
either nobody works (``idle_ms``: messages are on their way, or are looked at), or only calls of
another kind are under way (``asks_ms``). Moments count once, whoever works in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from sidecar.bench.transfer.transfer_rounds import covered_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sidecar.bench.transfer.transfer_rounds import Span

# What was called, and when it began and ended, in seconds on `time.monotonic()`'s clock.
Call: TypeAlias = "tuple[str, float, float]"

# By their names in :mod:`sidecar.bench.vllm_server`; ``put`` and ``send`` are the trainer's.
_PULLED: Final = {"receive", "verify", "load", "update"}
WORK: Final = frozenset(
    {"pause", "start", "put", "send", *_PULLED, "finish", "commit", "resume"},
)


@dataclass(frozen=True, slots=True)
class Window:
    """One update's, in ms.

    Attributes:
        window_ms: from the pause to the resume.
        asks_ms: nothing but calls that vLLM's own flow does not make was under way.
        idle_ms: nothing was.
        phases_ms: how long calls took, by name, those before the pause as well.
    """

    window_ms: float
    asks_ms: float
    idle_ms: float
    phases_ms: dict[str, float]

    @property
    def control_ms(self) -> float:
        """The control plane's part."""
        return self.asks_ms + self.idle_ms


def window(calls: Sequence[Call], window_ms: float) -> Window:
    """Of all calls of one update.

    Args:
        window_ms: as whoever paused counted it.
    """
    since_s = min(since_s for name, since_s, _ in calls if name == "pause")
    until_s = max(until_s for name, _, until_s in calls if name == "resume")
    inside = [call for call in calls if call[2] > since_s and call[1] < until_s]
    all_ms = covered_s(_spans(inside, since_s, until_s)) * 1000
    work = [call for call in inside if call[0] in WORK]
    work_ms = covered_s(_spans(work, since_s, until_s)) * 1000
    phases_ms: dict[str, float] = {}
    for name, begun_s, ended_s in calls:
        phases_ms[name] = phases_ms.get(name, 0.0) + (ended_s - begun_s) * 1000
    return Window(window_ms, all_ms - work_ms, window_ms - all_ms, phases_ms)


def _spans(calls: Iterable[Call], since_s: float, until_s: float) -> list[Span]:
    return [(max(begun_s, since_s), min(ended_s, until_s)) for _, begun_s, ended_s in calls]
