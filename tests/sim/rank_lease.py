"""The lease of a simulated rank, and what the cores of its DP group decide when it is over.

How cores come to agree is the subject of ``tests/model/test_lease_model.py``. Here they agree at
once, as soon as each of them runs, or is paused under a lease that is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus._protocol.engine.calls import CallCommit, CallPause
from bus.errors import EngineError
from sidecar._pause_lease import PauseLeaseWriter
from sidecar._shared_pages.pause_lease import LeaseInMemory

if TYPE_CHECKING:
    from bus._protocol.engine.calls import Call, SessionEffect
    from bus._runtime.interfaces import Handle
    from sidecar._shared_pages.pause_lease import LeaseOutcome, OutcomeState, PauseLease
    from tests.sim.engine import SimEngine

PERIOD_MS: Final = 200.0


class SimLease:
    """Writes the lease of one rank as its sidecar does, and ends the pause as its core does."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._page = LeaseInMemory()
        self._writer = PauseLeaseWriter(self, engine.session, engine.dp_group)  # type: ignore[arg-type]
        self._until_ms = self._due_ms = 0.0
        self._timer: Handle | None = None
        self.refusal: EngineError | None = None  # of the call that was begun last

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        engine = self._engine
        end = self._page.write_lease(lease)
        if end is None and lease is not None:
            now_ms = engine.process.now_ms()
            self._until_ms = now_ms + engine.session.held_for_ms(now_ms)
            self._arm()
        return end

    def write(self) -> list[SessionEffect]:
        """The sidecar writes the lease, or finds what the cores have decided."""
        engine = self._engine
        if engine.dp_size == 1:
            return []
        return self._writer.write(engine.process.now_ms())

    def begin(self, call: Call) -> bool:
        """Before a call; True: it is refused, as an engine that ended its pause loads nothing."""
        self.refusal = None
        if self._engine.dp_size == 1:
            return False
        if isinstance(call, CallPause):
            self._writer.begin_pause()
        self.write()
        if isinstance(call, CallCommit) or getattr(call, "changes_weights", False):
            try:
                self._writer.require_held()
            except EngineError as error:
                self.refusal = error
        return self.refusal is not None

    @property
    def vote(self) -> str:
        """What the core says of its weights; empty: nothing yet."""
        engine, lease = self._engine, self._page.lease()
        if engine.process.stopped:
            return ""
        if engine.truth.running:
            return "runs"
        if lease is not None and lease.partial and not lease.begun:
            return "partial"
        if lease is None or lease.begun or engine.running_call is not None:
            return ""
        return "whole" if engine.process.now_ms() >= self._until_ms else ""

    def _arm(self) -> None:
        when_ms = max(self._until_ms, self._engine.process.now_ms() + PERIOD_MS)
        if self._timer is not None:
            if self._due_ms <= when_ms:
                return
            self._timer.cancel()
        self._due_ms = when_ms
        self._timer = self._engine.process.call_at(when_ms, self._look)

    def _look(self) -> None:
        self._timer = None
        engine = self._engine
        if not engine.alive or engine.truth.running or self._page.lease() is None:
            return
        self._arm()
        if self.vote != "whole":
            return
        others = engine.other_ranks
        ranks = [engine, *(other for other in others if other is not None)]
        votes = {rank.dp_rank: rank.lease.vote for rank in ranks}
        missing = [rank for rank in range(engine.dp_size) if not votes.get(rank)]
        if missing:
            self._end("waiting", f"rank {missing[0]} has not voted")
            return
        versions = {rank.truth.version for rank in ranks}
        whole = len(versions) == 1 and "partial" not in votes.values()
        for rank in ranks:
            if not rank.truth.running:
                rank.lease._end("resumed" if whole else "quarantined", f"{votes}, {versions}")

    def _end(self, state: OutcomeState, reason: str) -> None:
        lease = self._page.lease()
        assert lease is not None
        self._page.write_outcome(lease.serial, state, reason)
        if state == "resumed":
            self._engine.resume_by_core()
