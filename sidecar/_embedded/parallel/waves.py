"""One rank's view of its DP group's waves, without I/O.

A wave is a time in which all ranks of the group step. The core reports events here, and does what
the results say. While a wave runs every rank steps, with a dummy batch if it has nothing to do,
because a step needs all ranks. All ranks count the wave's steps alike. At the first and then at
every ``interval``-th step they agree: they add up who has work and who is paused. So they end a
wave together, and number waves alike.

::

    rank          event                           next
    idle          a request, START_DP_WAVE        running
    idle          pause                           running, locally paused
    running       all ranks idle                  idle, the next wave
    running       pause                           running, locally paused
    loc. paused   all ranks paused                agreed, running to drain
    agreed        all ranks drained               globally paused, the next wave
    glob. paused  resume, and no rank has work    idle
    glob. paused  resume, and a rank has work     running

A pause of a running group ends its wave. A pause of an idle group starts a wave to end, so that an
idle rank learns in the same way that all have paused.

A locally paused rank acts on START_DP_WAVE, because the others may be blocked in a step until it
joins. After all ranks have agreed, the rank records START_DP_WAVE until the resume: it can only
have been sent for a request that still waits somewhere. START_DP_WAVE for an earlier wave changes
nothing in any state.
"""

from __future__ import annotations

from typing import Final

from sidecar._dp_coordinator.frames import CoreReport

DEFAULT_INTERVAL: Final = 16


class RankWaves:
    """Decides when a rank of a DP group steps, and agrees with the others.

    Args:
        interval: how many steps are between two agreements about who has work and who is paused.

    Attributes:
        number: number of the wave that runs, or else of the next one.
        step: how many steps of this wave have been made.
        running: whether a wave runs, so that this rank steps.
        paused: whether this rank has a pause and no resume since.
        agreed: whether the ranks have agreed that all of them are paused.
    """

    def __init__(self, rank: int, size: int, interval: int = DEFAULT_INTERVAL) -> None:
        self.rank = rank
        self.size = size
        self.number = 0
        self.step = 0
        self.running = False
        self.paused = False
        self.agreed = False
        self._interval = interval
        self._is_announced = False  # whether this wave was reported
        self._start: int | None = None  # the wave of a START_DP_WAVE while globally paused

    @property
    def is_globally_paused(self) -> bool:
        """Whether all ranks are paused and drained, so that none steps before all resume."""
        return self.agreed and not self.running

    @property
    def owes_wave(self) -> bool:
        """Whether this rank must start a wave when it resumes, because of a START_DP_WAVE.

        The rank that caused the START_DP_WAVE may have no work any more, and would not start the
        wave by itself.
        """
        return self._start is not None and self._start >= self.number

    def on_request(self, wave: int) -> CoreReport | None:
        """Handles a request of this rank's front end.

        A front end that has not yet received the end of a wave sends no FIRST_REQ for its request.
        Then the core itself starts the next wave and reports that.

        Args:
            wave: the wave that was running, or expected next, when the front end sent the request.

        Returns:
            A report for the coordinator that a wave has started; None if this rank starts none.
        """
        if wave < self.number and not self.running and not self.paused:
            self.running = True
            return CoreReport(self.rank, started=self.number)
        return None

    def on_start_wave(self, wave: int, excluded: int | None) -> bool:
        """Handles START_DP_WAVE.

        A greater wave number is adopted, but not during a wave, in which all ranks count steps
        together.

        Args:
            excluded: the rank for which the message is not meant; None: it is meant for all.

        Returns:
            Whether the rank steps in that wave from now on.
        """
        if excluded == self.rank or wave < self.number:
            return False
        if self.agreed:
            self._start = max(wave, self._start or 0)
            return False
        if not self.running:
            self.number, self.running = wave, True
        return True

    def join_in(self) -> CoreReport | None:
        """Starts a wave if none runs, because ranks can agree only within a wave.

        Returns:
            A report for the coordinator that a wave has started; None if this rank starts none.
        """
        if self.running or self.paused:
            return None
        self.running = True
        return CoreReport(self.rank, started=self.number)

    def on_step_begin(self) -> None:
        """Records that this rank begins a step, so a wave runs."""
        self.running = True

    def on_step_end(self) -> bool:
        """Counts a step; returns whether the step ends with an agreement of all ranks."""
        self.step += 1
        return self.step == 1 or self.step % self._interval == 0

    def on_agreement(self, unfinished: int, paused: int) -> CoreReport | None:
        """Handles the result of an agreement: sums over all ranks.

        Args:
            unfinished: how many ranks have requests that no pause holds.

        Returns:
            A report for the coordinator, if the wave has ended or the other ranks must join it.
                Only rank 0 reports; the others return None.
        """
        if paused == self.size:
            self.agreed = True
        speaks = self.rank == 0
        if unfinished or 0 < paused < self.size:
            if not speaks or self._is_announced or self.paused:
                return None
            self._is_announced = True
            return CoreReport(self.rank, started=self.number)
        over, self.number = self.number, self.number + 1
        self.step, self.running, self._is_announced = 0, False, False
        return CoreReport(self.rank, complete=over) if speaks else None

    def pause(self) -> None:
        """Pauses this rank; a second pause before a resume changes nothing."""
        if not self.agreed:
            self.paused = self.running = True

    def on_resumed(self, *, unfinished: bool) -> None:
        """Records that all ranks resume from a global pause.

        Args:
            unfinished: whether any rank has requests, or must start a wave because of a
                START_DP_WAVE.
        """
        kept, self._start = self._start, None
        self.paused = self.agreed = False
        if kept is not None and kept >= self.number:
            self.number, self.running = kept, True
        self.running = self.running or unfinished
