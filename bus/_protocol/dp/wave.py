"""Tracks the waves of one DP group, for the broker.

A wave is one running period of a DP group: from its first request until every rank is
idle. The DP group's coordinator (the bus's, or vLLM's own) owns the wave's number. The broker
mirrors it. Only the broker also has the state of the group's pause.

Invariants:

- START_DP_WAVE is sent while the group may still step, and never after PAUSED: a paused rank must
  not be asked into a wave that the others don't join.
- A FIRST_REQ that comes after PAUSED is kept, and starts a wave on RESUMED.
- Where engines start waves themselves (vLLM 0.33), no FIRST_REQ comes: the broker gets only STARTED
  and COMPLETE, and answers neither.
- A wave is under way from STARTED to COMPLETE. PAUSED ends it as well, because all ranks are idle
  then. A STARTED after PAUSED is remembered for RESUMED, because a resume may begin a wave
  before the broker has the acks of all ranks.
- The number falls only if the DP group restarts. It is always the greatest number that a
  coordinator has reported.
- A lost rank takes its DP group DOWN, until all ranks have joined again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from bus._protocol.core.state_table import StateMachine


class WaveState(StrEnum):
    """Whether a wave runs, and whether the DP group may step."""

    IDLE = "idle"
    RUNNING = "running"
    LOCAL = "locally paused"
    GLOBAL = "globally paused"
    DOWN = "down"


class WaveEvent(StrEnum):
    """Events that change a wave's state."""

    FIRST_REQ = "first_req"
    STARTED = "started"
    COMPLETE = "complete"
    PAUSE = "pause"
    PAUSED = "paused"
    RESUMED = "resumed"
    LOST = "lost"
    WHOLE = "whole"


_S = WaveState
_E = WaveEvent

TRANSITIONS: Final[dict[tuple[WaveState, WaveEvent], WaveState]] = {
    (_S.IDLE, _E.FIRST_REQ): _S.RUNNING,  # START_DP_WAVE
    (_S.IDLE, _E.STARTED): _S.RUNNING,  # decided without the broker
    (_S.IDLE, _E.PAUSE): _S.LOCAL,
    (_S.RUNNING, _E.FIRST_REQ): _S.RUNNING,  # START_DP_WAVE again: the first may be lost
    (_S.RUNNING, _E.STARTED): _S.RUNNING,
    (_S.RUNNING, _E.PAUSE): _S.LOCAL,
    (_S.LOCAL, _E.FIRST_REQ): _S.LOCAL,  # START_DP_WAVE: a wave is joined until all are paused
    (_S.LOCAL, _E.STARTED): _S.LOCAL,
    (_S.LOCAL, _E.PAUSE): _S.LOCAL,  # a repeated request
    (_S.LOCAL, _E.PAUSED): _S.GLOBAL,
    (_S.LOCAL, _E.RESUMED): _S.IDLE,  # dropped out of the pause; RUNNING if a wave is under way
    (_S.GLOBAL, _E.FIRST_REQ): _S.GLOBAL,  # FIRST_REQ_HELD: kept
    # An old notice; or the resume began a wave, and not all ranks have acknowledged the resume.
    (_S.GLOBAL, _E.STARTED): _S.GLOBAL,
    (_S.GLOBAL, _E.PAUSE): _S.GLOBAL,
    (_S.GLOBAL, _E.PAUSED): _S.GLOBAL,
    # A kept request starts: START_DP_WAVE, RUNNING; RUNNING also if a wave is under way.
    (_S.GLOBAL, _E.RESUMED): _S.IDLE,
    (_S.DOWN, _E.FIRST_REQ): _S.DOWN,  # FIRST_REQ_HELD
    (_S.DOWN, _E.STARTED): _S.DOWN,
    (_S.DOWN, _E.WHOLE): _S.IDLE,  # all ranks have joined again
    # The wave's number grows.
    **{(each, _E.COMPLETE): _S.IDLE if each is _S.RUNNING else each for each in _S},
    **{(each, _E.LOST): _S.DOWN for each in _S},  # a rank died, and a kept request with it
}


class WaveMachine(StateMachine[WaveState, WaveEvent]):
    """Tracks the waves of one DP group for the broker."""

    def __init__(self) -> None:
        super().__init__("wave", TRANSITIONS, _S.IDLE)
        self.wave = 0  # the number of the running wave, or of the next one
        self.kept = False  # a FIRST_REQ that waits for the resume
        self.under_way = False  # as a coordinator or a status page reported
        self.rank: int | None = None  # the rank that began it; None: unknown

    def first_req(self, wave: int) -> bool:
        """Records that an idle rank got a request and asks for this wave.

        Returns:
            Whether to send START_DP_WAVE now. In a pause the request is kept for the resume.
        """
        self._go(_E.FIRST_REQ)
        self.wave = max(self.wave, wave)
        if self.state in (_S.GLOBAL, _S.DOWN):
            self.kept = self.state is _S.GLOBAL
            return False
        return True

    @property
    def started_by(self) -> int | None:
        """The rank that began the wave under way; None: no wave, or unknown."""
        return self.rank if self.under_way else None

    def on_started(self, wave: int, rank: int | None = None) -> bool:
        """Records that ``rank`` began this wave; returns False if the report is old."""
        if wave < self.wave:
            return False
        self._go(_E.STARTED)
        self.wave, self.rank = wave, rank
        self.under_way = self.state is not _S.DOWN
        return True

    def complete(self, wave: int) -> bool:
        """Records that this wave is over: all ranks are idle. Returns False for an old report."""
        if wave < self.wave:
            return False
        self._go(_E.COMPLETE)
        self.wave = wave + 1
        self.under_way = False
        return True

    def mirror(self, wave: int, *, running: bool, rank: int | None = None) -> None:
        """Adopts a coordinator's wave state, because the broker may have missed its reports.

        Args:
            wave: the number of the running wave, or of the next one.
            running: whether a wave runs.
            rank: the rank that began the running wave; None: unknown.
        """
        if running:
            self.on_started(wave, rank)
        elif wave > self.wave:
            self.complete(wave - 1)

    def on_coordinator_restarted(self) -> None:
        """Records that a new coordinator counts waves from 0; the earlier one's wave is over."""
        self._go(_E.COMPLETE)
        self.wave = 0
        self.under_way = False

    def on_pause_asked(self) -> None:
        """Records that PAUSE_LOCAL was sent to all ranks."""
        if self.state is not _S.DOWN:
            self._go(_E.PAUSE)

    def on_paused(self) -> None:
        """Records that every rank has acknowledged PAUSE_GLOBAL."""
        if self.state is not _S.DOWN:
            self._go(_E.PAUSED)
            self.under_way = False

    def on_resumed(self) -> bool:
        """Records that every rank schedules requests again.

        Returns:
            Whether to send START_DP_WAVE now, for a request that was kept over the pause.
        """
        if self.state in (_S.IDLE, _S.RUNNING, _S.DOWN):
            return False
        self._go(_E.RESUMED)
        if self.under_way:
            self._go(_E.STARTED)
        if not self.kept:
            return False
        self.kept = False
        return self.first_req(self.wave)

    def on_rank_lost(self) -> None:
        """Records that a rank was lost, so that the DP group is down."""
        self._go(_E.LOST)
        self.kept = self.under_way = False

    def whole(self) -> None:
        """Records that all ranks have joined again; their waves count from 0."""
        if self.state is _S.DOWN:
            self._go(_E.WHOLE)
            self.wave = 0
