"""Draws the picture of ``bench gap``: each way's tokens during an update, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    # An update's length in ms, and for each token: when it came, in ms from the update's begin, and
    # the gap to the token before it in its request, in ms.
    Trace: TypeAlias = tuple[float, Sequence[tuple[float, float]]]

_TITLES: Final = {
    "native": "native: pause, update, resume",
    "paused": "over the bus, paused",
    "staged": "over the bus, staged",
}
_COLORS: Final = {"native": "#b5432a", "paused": "#a8781e", "staged": "#1a7566"}
_INK: Final = "#333"
# The time shown before and after the longest update: as a part of its length, and at least.
_AROUND: Final = 0.35
_AROUND_MS: Final = 150.0


def draw(shown: Mapping[str, Trace], figures: Mapping[str, Any], path: Path) -> None:
    """Draws the tokens of one round of each way, as a PNG.

    Args:
        shown: by way, the round to show: the update's length in ms, and for each token when it came
            and the gap before it, in ms.
        figures: the figures of all rounds.
        path: the PNG's path.
    """
    longest_ms = max(update_ms for update_ms, _ in shown.values())
    around_ms = max(_AROUND_MS, _AROUND * longest_ms)
    left_ms, right_ms = -around_ms, longest_ms + around_ms
    highest_ms = max(_longest(*each)[1] for each in shown.values())
    figure = Figure(figsize=(12, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True)
    for (way, (update_ms, tokens)), axes in zip(shown.items(), panels, strict=True):
        color = _COLORS[way]
        inside = [(at, gap) for at, gap in tokens if left_ms <= at <= right_ms]
        axes.axvspan(0, update_ms, color=color, alpha=0.13, linewidth=0)
        axes.axhline(figures[way]["step_p99_ms"], color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.scatter(*zip(*inside, strict=True), s=7, color=color, alpha=0.6, linewidths=0)
        at_ms, gap_ms = _longest(update_ms, tokens)
        axes.plot([at_ms - gap_ms, at_ms], [gap_ms, gap_ms], color=color, linewidth=2.5)
        axes.plot([at_ms], [gap_ms], "o", color=color, markersize=6)
        axes.annotate(
            f"{gap_ms:.0f} ms",
            (min(max(at_ms - gap_ms / 2, left_ms + 0.1 * (right_ms - left_ms)), right_ms), gap_ms),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            color=color,
            fontsize=13,
            fontweight="bold",
        )
        axes.set_title(_TITLES[way], loc="left", fontsize=11, color=_INK)
        axes.set_xlabel("ms since the update began", color=_INK)
        axes.set_xlim(left_ms, right_ms)
        axes.set_ylim(0, highest_ms * 1.15)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("time since the request's token before, ms", color=_INK)
    gaps = ", ".join(f"{figures[way]['gap_ms']:.0f} ms {way}" for way in shown)
    figure.suptitle(
        f"Longest wait for a token while weights are updated: {gaps}",
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=_INK,
    )
    figure.supxlabel(_caption(figures), fontsize=8.5, color="#666")
    figure.savefig(path)


def _longest(update_ms: float, tokens: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the end and the length of the update's longest gap, in ms."""
    of_update = [(at, gap) for at, gap in tokens if at > 0 and at - gap < update_ms]
    return max(of_update, key=lambda each: each[1])


def _caption(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['engine']} engine, {figures['megabytes']:,.0f} MB over {figures['backend']}, "
        f"{figures['requests']} requests; of each way, the round of its median\n"
        "Dot: a token of one of the requests. Shaded: the update. Bar: its longest gap. "
        "Dashed: p99 of ordinary gaps, before it."
    )
