"""The core of a rank, which steps and pauses together with its peer ranks.

A pause has two phases. A rank that gets a pause schedules nothing new but continues to step with
the others (locally paused). Every few steps, at an *agreement*, the ranks exchange their states. If
all are paused and drained, they stop together (globally paused), and only then the pauses return. A
resume is a barrier of all ranks, which also counts the ranks that have requests by then.

So no order of calls can leave one rank in a step that the others will not join, if every rank is
called in the end. In particular:

- A second pause of a rank that is pausing or paused starts no second agreement. Ranks may be
  paused once or several times, in any order.
- A resume of a rank that is not paused does nothing. It is no barrier, since the others would not
  join.

All ranks make a **swap** before the same step, or none does. A rank with a pending swap is *ready*,
and reports that at the agreements. When all are ready, all swap at once. So no step number is fixed
in advance, which a rank might have passed. If one rank is not ready (it got no swap, can't swap, or
had it cancelled), all ranks continue with the old weights. An idle group starts a wave for a swap.
A pause has no step at which to agree: a swap that waits when all ranks have paused is cancelled.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import bus.log
from bus.errors import EngineDead, EngineError
from bus.messages import NackCode
from sidecar._embedded.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar._dp_coordinator.frames import CoreReport
    from sidecar._embedded.model import ModelRunner
    from sidecar._embedded.parallel.group import RankGroup
    from sidecar._embedded.parallel.waves import RankWaves
    from sidecar._embedded.requests import Publish
    from sidecar._lease_agreement import RankLease
    from sidecar._shared_pages.core_status import CoreStatusPage


# A step that waits for other ranks ends only if they join.
_STOP_PATIENCE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class PendingSwap:
    """A swap of one rank, which waits until all ranks are ready to swap.

    Attributes:
        take: changes the weights.
        clear_cache: whether requests recompute their keys and values.
        made: done when the swap is made; raises the error if the swap is cancelled.
    """

    take: Callable[[], None]
    clear_cache: bool
    made: Future[None]


def swap_cancelled(why: str) -> EngineError:
    """Returns the error of a swap that was cancelled, so that nothing has changed.

    Args:
        why: the reason.
    """
    return EngineError(f"the swap was called off: {why}", code=NackCode.CALLED_OFF)


class LockstepCore(EngineCore):
    """An engine core that runs each step together with its peer ranks.

    Args:
        model: as in :class:`EngineCore`.
        slots: as in :class:`EngineCore`.
        publish: as in :class:`EngineCore`.
        died: as in :class:`EngineCore`.
        page: as in :class:`EngineCore`.
        group: the collectives that connect the ranks. The model's expert exchange uses them, too.
        waves: this rank's state in the DP group's waves.
        report: called in the core's thread with each message for the DP coordinator.

    Attributes:
        lease: ends a pause whose lease is over; None before :meth:`start`.
        resumes: how often the core has resumed, with all ranks.
        is_resuming: whether the core waits in a resume for other ranks.
    """

    def __init__(
        self,
        model: ModelRunner,
        *,
        slots: int,
        publish: Publish,
        died: Callable[[str], None],
        page: CoreStatusPage,
        group: RankGroup,
        waves: RankWaves,
        report: Callable[[CoreReport], None],
    ) -> None:
        super().__init__(model, slots=slots, publish=publish, died=died, page=page)
        self._group = group
        self._waves = waves
        self._report = report
        self._log = bus.log.logger(dp_group=group.name, dp_rank=group.rank)
        self._ready: PendingSwap | None = None
        self.lease: RankLease | None = None
        self.resumes = 0
        self.is_resuming = False

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    @property
    def is_pause_complete(self) -> bool:
        """Whether all ranks have paused, and the core is idle."""
        return self._waves.is_globally_paused and not self._pausing

    def swap(
        self, check: Callable[[], None], take: Callable[[], None], *, clear_cache: bool
    ) -> Future[None]:
        """Changes the weights when all ranks are ready; see :meth:`EngineCore.swap`."""
        made: Future[None] = Future()

        def run() -> None:
            try:
                if self._waves.paused or self._ready is not None:
                    raise swap_cancelled("the rank is paused, or has another swap pending")
                check()
            except EngineError as error:
                made.set_exception(error)
            else:
                self._ready = PendingSwap(take, clear_cache, made)
                self._send(self._waves.join_in())
                self._note("swap_ready")

        self._put(run, made)
        return made

    def call_off(self) -> Future[None]:
        """Cancels a swap that waits for other ranks."""
        return self.call(lambda: self._cancel_swap("the sidecar has cancelled it"))

    def start_wave(self, wave: int, excluded: int | None) -> None:
        """Handles START_DP_WAVE of the coordinator; safe in any thread.

        Args:
            wave: the wave's number.
            excluded: the rank for which the message is not meant; None: it is meant for all.
        """

        def run() -> None:
            obeyed = self._waves.on_start_wave(wave, excluded)
            self._note("start_dp_wave", told=wave, obeyed=obeyed)

        with contextlib.suppress(EngineDead):
            self._put(run)

    def stop(self) -> None:
        """Ends every request, then the core's thread.

        A thread that waits for other ranks in a step or a resume is left, and ends with the
        process.
        """
        self._ask_to_stop()
        self._thread.join(_STOP_PATIENCE_S)
        if self._thread.is_alive():
            self._leave("the engine is closed")

    def resume(self) -> None:
        """Resumes with all ranks; a rank that is not paused does nothing."""
        if not self._waves.paused:
            return
        super().require_paused("resume")
        self._require_awake("resume")
        self._mode = None
        self._show("barrier")
        self.is_resuming = True
        (unfinished,) = self._group.sums(int(self._may_step() or self._waves.owes_wave))
        self.resumes += 1
        self.is_resuming = False
        self._waves.on_resumed(unfinished=unfinished > 0)
        self._note("resumed", unfinished=unfinished)

    def require_paused(self, what: str) -> None:
        """Rejects a call also while the ranks decide how the pause ends.

        Raises:
            EngineError: code ``wrong_state``.
        """
        super().require_paused(what)
        if self.lease is not None and self.lease.is_void:
            raise EngineError(
                f"{what}: the pause's lease was over, and the ranks decide how the pause ends",
                code=NackCode.WRONG_STATE,
            )

    def join_pause(self) -> None:
        """Begins a pause that keeps requests, for a peer rank's sake; in the core's thread."""
        self._mode = "keep"
        self._pausing.append(Future())
        self._on_pause_requested()
        self._settle_pause()

    def end_requests(self) -> None:
        """Ends every request with the tokens it has; in the core's thread."""
        self._abort(lambda _: True)

    def _on_request(self, wave: int) -> None:
        self._send(self._waves.on_request(wave))

    def _on_rejected(self, wave: int) -> None:
        """Joins the wave of a rejected request, because the other ranks start it."""
        self._waves.on_start_wave(wave, None)

    def _on_pause_requested(self) -> None:
        self._waves.pause()
        self._note("locally_paused", mode=self._mode)

    def _has_step(self) -> bool:
        return self._waves.running or self._may_step()

    def _is_quiet(self) -> bool:
        return self._waves.is_globally_paused

    def _wave(self) -> tuple[int, bool]:
        return self._waves.number, self._waves.running

    def _turn(self) -> None:
        waves = self._waves
        waves.on_step_begin()
        first = waves.step == 0
        act, phase = (self._step, "step") if self._may_step() else (self._dummy, "dummy")
        if first:
            self._note("wave_entered", phase=phase)
        act()
        if first:
            self._note("wave_stepped")
        if waves.on_step_end():
            self._agree()

    def _dummy(self) -> None:
        self._steps += 1
        self._show("dummy")
        self.model.dummy()

    def _agree(self) -> None:
        waves = self._waves
        self._show("sync")
        unfinished, paused, ready = self._group.sums(
            int(self._may_step()), int(waves.paused), int(self._ready is not None)
        )
        if ready == waves.size:
            self._make_swap()
        before = waves.agreed
        report = waves.on_agreement(unfinished, paused)
        if waves.is_globally_paused:
            self._cancel_swap("all ranks have paused")
        if waves.agreed and not before:
            self._note("all_paused")
        if not waves.running:
            self._note("globally_paused" if waves.agreed else "wave_complete")
        self._send(report)

    def _make_swap(self) -> None:
        ready, self._ready = self._ready, None
        assert ready is not None, "all ranks are ready"
        self._show("work")
        self._swap_now(ready.take, clear_cache=ready.clear_cache)
        self._note("swapped", version=self.version)
        ready.made.set_result(None)

    def _cancel_swap(self, why: str) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            self._note("swap_called_off", why=why)
            ready.made.set_exception(swap_cancelled(why))

    def _send(self, report: CoreReport | None) -> None:
        if report is not None:
            self._report(report)

    def _note(self, event: str, **fields: object) -> None:
        self._log.debug(event, wave=self._waves.number, step=self._waves.step, **fields)
