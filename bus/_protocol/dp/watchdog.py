"""Diagnoses from status pages why ranks of a DP group don't step.

Ranks step in lockstep: in a collective each waits for all. So a rank that stays in a collective
for long is not the cause; a rank that is absent from it is.

==========  =====================================================================
health      when
==========  =====================================================================
ok          every rank is idle, or has moved within ``SLOW_MS``
slow        a rank has been in a step or a collective for longer, and no rank is
            absent; or not yet for ``WEDGED_MS``
wedged      a rank has been in a collective for ``WEDGED_MS``, and another one is
            not in it (idle, or in another one); or all have been in it for
            ``STUCK_MS``
down        a rank is lost; the others can't step until it is back, or all are restarted
unknown     a rank has no status page, or has not reported it for ``SILENT_MS``
==========  =====================================================================

Ranks are stuck if they are wedged. The remaining ranks of a DP group that is down are stuck once
one of them has been in a collective for ``WEDGED_MS``, because that collective can't end. For an
engine that steps alone see :func:`describe_stall`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from bus.messages import CorePhase, CoreStatus

_NAMED: Final = 8  # how many ranks without a page a diagnosis names

# The thresholds, in ms. Status pages come with heartbeats; an older one than SILENT_MS does not
# show the present state. A forward pass with a long prompt takes seconds. A collective on a working
# host never takes STUCK_MS.
SILENT_MS: Final = 5_000.0
SLOW_MS: Final = 2_000.0
WEDGED_MS: Final = 10_000.0
STUCK_MS: Final = 60_000.0

Health: TypeAlias = Literal["ok", "slow", "wedged", "down", "unknown"]

# The collective in which a rank waits for the others, by phase; `step` and `dummy` share one.
_MEETING: Final[dict[CorePhase, str]] = {
    "step": "forward pass",
    "dummy": "forward pass",
    "sync": "all-reduce",
    "barrier": "resume barrier",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The health of a DP group.

    Attributes:
        health: ``ok``, ``slow``, ``wedged``, ``down`` or ``unknown``; the module explains them.
        text: the reason, for people.
        absent: the ranks that the others wait for.
        stuck: True: only a restart of all ranks helps.
    """

    health: Health
    text: str = ""
    absent: tuple[int, ...] = ()
    stuck: bool = False


@dataclass(slots=True)
class _Report:
    name: str
    status: CoreStatus
    received_ms: float

    def stalled_ms(self, now_ms: float) -> float:
        return self.status.since_ms + now_ms - self.received_ms

    def where(self) -> str:
        return _MEETING.get(self.status.phase, "")


class Watchdog:
    """Diagnoses the health of one DP group of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._reports: dict[int, _Report] = {}
        self._lost: dict[int, tuple[str, str, float]] = {}  # name, reason, when

    def report(self, rank: int, name: str, status: CoreStatus, now_ms: float) -> None:
        """Records a rank's status page, as its sidecar has just read it."""
        self._reports[rank] = _Report(name, status, now_ms)

    def on_rank_lost(self, rank: int, name: str, reason: str, now_ms: float) -> None:
        """Records that a rank was lost; :meth:`diagnose` reports its name and the reason."""
        self._lost[rank] = (name, reason, now_ms)

    def whole(self) -> None:
        """Drops all reports, because all ranks have joined again."""
        self._reports.clear()
        self._lost.clear()

    def diagnose(self, now_ms: float) -> Diagnosis:
        """Returns the ranks' health, with where each stalled rank waits, and the absent ranks."""
        if self._lost:
            return self._down(now_ms)
        missing = self.size - sum(map(self._has_page, self._reports))
        if missing:
            without = (rank for rank in range(self.size) if not self._has_page(rank))
            named = ", ".join(map(str, itertools.islice(without, _NAMED)))
            others = f" and {missing - _NAMED} more" if missing > _NAMED else ""
            return Diagnosis("unknown", f"no status page of rank {named}{others}")
        silent = [
            f"rank {rank} ({report.name}) has sent no status for "
            f"{_seconds(now_ms - report.received_ms)}"
            for rank, report in sorted(self._reports.items())
            if now_ms - report.received_ms > SILENT_MS
        ]
        if silent:
            return Diagnosis("unknown", "; ".join(silent))
        return self._stepping(now_ms)

    def _has_page(self, rank: int) -> bool:
        report = self._reports.get(rank)
        return report is not None and report.status.phase != ""

    def _down(self, now_ms: float) -> Diagnosis:
        parts = [
            f"rank {rank} ({name}) has been gone for {_seconds(now_ms - when_ms)}: {reason}"
            for rank, (name, reason, when_ms) in sorted(self._lost.items())
        ]
        stalled = [
            (rank, report)
            for rank, report in sorted(self._reports.items())
            if rank not in self._lost and report.where() and report.stalled_ms(now_ms) > WEDGED_MS
        ]
        parts += [_describe_rank(rank, report, now_ms) for rank, report in stalled]
        text = f"{'; '.join(parts)}; all {self.size} ranks restart together"
        return Diagnosis("down", text, tuple(sorted(self._lost)), bool(stalled))

    def _stepping(self, now_ms: float) -> Diagnosis:
        stalled = {
            rank: report
            for rank, report in sorted(self._reports.items())
            if report.where() and report.stalled_ms(now_ms) > SLOW_MS
        }
        if not stalled:
            return Diagnosis("ok")
        longest_ms = max(report.stalled_ms(now_ms) for report in stalled.values())
        absent = self._absent_ranks(stalled, now_ms)
        parts = [_describe_rank(rank, self._reports[rank], now_ms) for rank in stalled]
        if absent:
            parts += [
                f"{_describe_rank(rank, self._reports[rank], now_ms)}: absent"
                for rank in absent
                if rank not in stalled
            ]
        limit_ms = WEDGED_MS if absent else STUCK_MS
        health: Health = "wedged" if longest_ms > limit_ms else "slow"
        return Diagnosis(health, "; ".join(parts), tuple(absent), health == "wedged")

    def _absent_ranks(self, stalled: dict[int, _Report], now_ms: float) -> list[int]:
        """Returns the ranks that have not entered the collective of the longest-waiting rank."""
        first = max(stalled.values(), key=lambda report: report.stalled_ms(now_ms))
        return [
            rank
            for rank, report in sorted(self._reports.items())
            if report.where() != first.where()
        ]


def describe_stall(
    status: CoreStatus | None, heard_ms: float, now_ms: float, limit_ms: float
) -> str:
    """Returns a text about an engine core that stands still for too long.

    Empty: the core moves, is idle, or has no status page.

    Args:
        status: the core's last status page; None: none was reported.
        heard_ms: when the page was reported.
        limit_ms: how long a core may be in one phase of one step.
    """
    if status is None or status.phase in ("", "idle"):
        return ""
    stalled_ms = status.since_ms + now_ms - heard_ms
    if stalled_ms <= limit_ms:
        return ""
    return f"its core has been in `{status.phase}` for {_seconds(stalled_ms)}, step {status.step}"


def _describe_rank(rank: int, report: _Report, now_ms: float) -> str:
    status = report.status
    doing = {"idle": "idle", "work": "between steps"}.get(status.phase, "")
    doing = doing or f"in the {report.where()} ({status.phase})"
    since = _seconds(report.stalled_ms(now_ms))
    place = f"step {status.step}, wave {status.wave}"
    return f"rank {rank} ({report.name}) has been {doing} for {since}, {place}"


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.1f} s"
