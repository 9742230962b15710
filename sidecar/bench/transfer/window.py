"""What happened in an update, and how much of its time was control.

An update takes from its first message to its last. In it **tensors move** while the trainer puts or
sends a chunk, and while the engine receives, verifies or loads one. All the rest is **control**:
either other calls are under way (``asks_ms``: the engine pauses, starts, finishes, takes its new
version or resumes), or none is (``idle_ms``: messages are on their way, or are looked at). Moments
count once, whatever is done in them.

The **window** is what the engine stands still for: from the first PAUSE_LOCAL to the last engine
resumed, as the broker counts it; without a bus from the post of the pause to the answer of the
resume, as the trainer counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from sidecar.bench.transfer.transfer_rounds import covered_s

if TYPE_CHECKING:
    from collections.abc import Sequence

# What was called, and when it began and ended, in seconds on `time.monotonic()`'s clock.
Call: TypeAlias = "tuple[str, float, float]"

# By their names in :mod:`sidecar.bench.vllm_server`; ``put`` and ``send`` are the trainer's.
MOVES: Final = frozenset({"put", "send", "receive", "verify", "load", "update"})


@dataclass(frozen=True, slots=True)
class Window:
    """One update's, in ms.

    Attributes:
        window_ms: from the pause to the resume.
        asks_ms: calls were under way, and none that moves tensors.
        idle_ms: no call was.
        phases_ms: how long calls took, by name.
    """

    window_ms: float
    asks_ms: float
    idle_ms: float
    phases_ms: dict[str, float]

    @property
    def control_ms(self) -> float:
        """When no tensor moved."""
        return self.asks_ms + self.idle_ms


def window(calls: Sequence[Call], since_s: float, until_s: float, window_ms: float) -> Window:
    """Of all calls of one update.

    Args:
        since_s, until_s: when it began, and ended.
        window_ms: as whoever paused counted it.
    """
    calls = [
        (name, max(begun_s, since_s), min(ended_s, until_s))
        for name, begun_s, ended_s in calls
        if ended_s > since_s and begun_s < until_s
    ]
    all_ms = covered_s(call[1:] for call in calls) * 1000
    moving_ms = covered_s(call[1:] for call in calls if call[0] in MOVES) * 1000
    phases_ms: dict[str, float] = {}
    for name, begun_s, ended_s in calls:
        phases_ms[name] = phases_ms.get(name, 0.0) + (ended_s - begun_s) * 1000
    idle_ms = (until_s - since_s) * 1000 - all_ms
    return Window(window_ms, all_ms - moving_ms, idle_ms, phases_ms)
