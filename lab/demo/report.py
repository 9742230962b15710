"""The demo's output: a progress line, a table and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

mpl.use("Agg")  # no display is needed, nor looked for
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

    from lab.demo.run import DemoResult


class ProgressLine(Progress):
    """Shows steps, reward and version on stderr while the demo runs.

    Args:
        total: how many steps, or updates, the run has at most.
    """

    def __init__(self, total: int) -> None:
        super().__init__(
            TextColumn("training"),
            BarColumn(bar_width=30),
            TextColumn("step {task.completed:>3.0f}"),
            TextColumn("reward [green]{task.fields[reward]:.2f}[/]"),
            TextColumn("greedy [bold green]{task.fields[greedy]:.2f}[/]"),
            TextColumn("weights [cyan]v{task.fields[version]}[/]"),
            TextColumn("lost {task.fields[lost]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
        )
        self._row = self.add_task("", total=total, reward=0.0, greedy=0.0, version=0, lost=0)

    def say(self, text: str) -> None:
        """Prints a line of text above the progress line."""
        self.console.print(f"[dim]{text}[/]")

    def show(self, result: DemoResult, version: int) -> None:
        """Shows the results so far, and the ``version`` that engines serve."""
        self.update(
            self._row,
            completed=len(result.train_rewards),
            reward=result.train_rewards[-1] if result.train_rewards else 0.0,
            greedy=result.reward_last,
            version=version,
            lost=result.counts.lost,
        )


def table(result: DemoResult) -> Table:
    """Returns a table of a run's results."""
    counts, verdict, plan = result.counts, result.verdict, result.plan
    per_version = sorted(counts.tokens_by_version.values())
    rows = {
        "greedy reward": f"{result.reward_first:.3f} → {result.reward_last:.3f}",
        "weight updates": f"{len(result.reports)}, {result.staged} of them staged, "
        f"{result.interrupted} in the middle of requests",
        "pause per update": f"p50 {result.pause_ms(0.5):.1f} ms, "
        f"p99 {result.pause_ms(0.99):.1f} ms",
        "time without a token": f"swap p50 {result.swap_ms:.1f} ms, longest gap between two tokens "
        f"{counts.longest_token_gap_ms:.0f} ms",
        "requests": f"{counts.requests}, {counts.lost} lost",
        "tokens per version": f"median {per_version[len(per_version) // 2]}, from {per_version[0]} "
        f"to {per_version[-1]}, over {len(per_version)} versions"
        if per_version
        else "none",
        "tokens checked": f"{verdict.tokens} computed again with the weights of their version, "
        f"{verdict.mixed} differ",
        "engines": f"{plan.engine_count} × {plan.engine}",
        "time": f"{result.seconds:.0f} s, {len(result.train_rewards)} optimizer steps",
    }
    shown = Table(title="wavebus demo", title_justify="left", show_header=False, min_width=60)
    shown.add_column(style="bold")
    shown.add_column()
    for row in rows.items():
        shown.add_row(*row)
    return shown


def picture(result: DemoResult, path: Path) -> None:
    """Plots reward over optimizer steps, with every update marked."""
    figure, axes = plt.subplots(figsize=(9, 4.5), dpi=120, layout="constrained")
    steps = range(1, len(result.train_rewards) + 1)
    axes.plot(steps, result.train_rewards, color="#9ab", linewidth=1, label="rollouts (sampled)")
    axes.plot(
        *zip(*result.greedy, strict=True),
        color="#176",
        marker="o",
        markersize=4,
        linewidth=2,
        label="held out (greedy, through the engines)",
    )
    if result.reports:
        interrupted = [step for step, report in result.reports.items() if report.interrupted]
        for label, hit, color, low in (
            ("weight update", list(result.reports), "#c63", -0.06),
            ("… in the middle of requests", interrupted, "#36c", -0.12),
        ):
            axes.vlines(hit, low, low + 0.04, color=color, linewidth=0.6, label=label)
    axes.set_ylim(-0.14, 1.04)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward")
    sent = f"{len(result.reports)} weight updates" if result.reports else "no weights sent"
    axes.set_title(
        f"GRPO on {result.plan.engine_count} {result.plan.engine} engines: {sent}, "
        f"pause p50 {result.pause_ms(0.5):.0f} ms, {result.counts.lost} requests lost",
        loc="left",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def show(result: DemoResult, picture_path: Path) -> None:
    """Prints the table and the path of the plot."""
    Console(highlight=False).print(table(result), f"picture: {picture_path}")
