"""One rank's view of its group's waves. No I/O: the core brings what happened.

A wave is one running period of the group. While it runs every rank steps, with a dummy
batch if it has nothing, since a step needs all of them. All ranks count its steps alike,
and at the first and then every ``interval``-th step they add up who still has work and
who is paused. So they end a wave together, and number waves alike.

::

    rank          event                           next
    idle          a request, START_DP_WAVE        running
    idle          pause                           running, locally paused
    running       all ranks idle                  idle, the next wave
    running       pause                           running, locally paused
    loc. paused   all ranks paused                agreed, running to drain
    agreed        all ranks drained               globally paused, the next wave
    glob. paused  resume, and nobody has work     idle
    glob. paused  resume, and somebody has work   running

Each pause of a running group ends its wave, and one of an idle group makes a wave to end:
an idle rank, too, learns that way that all have paused.

START_DP_WAVE is obeyed by a rank that has merely been asked to pause: the others may be
blocked in a step until it joins. After all have agreed it is kept in mind until the
resume, since one for this wave can only have been sent for a request that still waits
somewhere. One for an earlier wave is over, and changes nothing in any state.
"""

from __future__ import annotations

from typing import Final

from sidecar.dp_coordinator.frames import CoreReport

DEFAULT_INTERVAL: Final = 16


class RankWaves:
    """The state, and what happens to it.

    Attributes:
        number: of the wave that runs, or else of the next one.
        step: of this wave, as many as were made.
        running: a wave runs, so this rank steps.
        paused: a pause was asked of this rank, and no resume since.
        agreed: all ranks have been asked, and know it.
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
        self._is_announced = False  # that this wave runs
        self._start: int | None = None  # came while globally paused

    @property
    def is_globally_paused(self) -> bool:
        """All ranks are paused and drained: nobody will step before all have resumed."""
        return self.agreed and not self.running

    @property
    def owes_wave(self) -> bool:
        """Whether a START_DP_WAVE came that is to be obeyed after the resume. Who asked for that
        wave may have nothing to do any more, and then wouldn't step in it.
        """
        return self._start is not None and self._start >= self.number

    def on_request(self, wave: int) -> CoreReport | None:
        """A request came; its front end believed in this wave. What the others must hear.

        A front end that has not heard yet that the wave is over tells nobody of the
        request, so the core does.
        """
        if wave < self.number and not self.running and not self.paused:
            self.running = True
            return CoreReport(self.rank, started=self.number)
        return None

    def on_start_wave(self, wave: int, excluded: int | None) -> bool:
        """START_DP_WAVE; whether it is obeyed now.

        A greater number than one's own is adopted, but not in the middle of a wave,
        where all ranks count alike without being told.
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
        """This rank has something to confer about: a wave runs, or starts. What the others must
        hear.
        """
        if self.running or self.paused:
            return None
        self.running = True
        return CoreReport(self.rank, started=self.number)

    def on_step_begin(self) -> None:
        self.running = True

    def on_step_end(self) -> bool:
        """Whether the ranks are to confer now."""
        self.step += 1
        return self.step == 1 or self.step % self._interval == 0

    def on_agreement(self, unfinished: int, paused: int) -> CoreReport | None:
        """How many ranks have work that they may do, and how many are paused.

        Returns:
            What the coordinator must hear. Rank 0 speaks for all.
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
        """This rank is asked to pause. Asked again, before a resume, it changes nothing."""
        if not self.agreed:
            self.paused = self.running = True

    def on_resumed(self, *, unfinished: bool) -> None:
        """All ranks have been asked to resume; whether any of them has work, or owes a wave.

        Only after :attr:`is_globally_paused`.
        """
        kept, self._start = self._start, None
        self.paused = self.agreed = False
        if kept is not None and kept >= self.number:
            self.number, self.running = kept, True
        self.running = self.running or unfinished
