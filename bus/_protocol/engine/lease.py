"""Ends an engine's pause if its lease expires; runs in the engine's sidecar.

PAUSE_LOCAL starts the lease. The broker's answer to a heartbeat renews it, if the answer names the
pause. The broker names the pause only while the owning trainer is alive. So the lease expires if
the trainer, the broker or the connection is lost.

The sidecar of an engine alone then undoes what the update has begun, and resumes the engine. The
sidecar of a rank with peer ranks only undoes, and records on the lease page that the lease is over.
The engine cores decide how the pause ends (:mod:`sidecar._lease_agreement`). The sidecar reads
their decision on the page (:mod:`sidecar._pause_lease`).

Invariants:

- A sidecar resumes a rank only on the broker's request. So no rank resumes alone.
- While the cores may decide, the sidecar begins no update.
- A new pause begins a new lease, which takes the core's vote back. If the cores had decided before,
  they resume all the same. Then the sidecar refuses what would change weights, and reports that the
  engine runs (:meth:`sidecar._pause_lease.PauseLeaseWriter.require_held`). If they had decided to
  stay paused, the new lease goes on, so that its end undoes what the new pause begins.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from bus._protocol.core.state_table import StateMachine

# How often a sidecar retries to end a pause whose lease is over.
LEASE_RETRY_MS: Final = 1000.0


class LeaseState(StrEnum):
    """The state of a lease. SETTLED: it is over, and the engine stays paused."""

    FREE = "free"
    HELD = "held"
    OVER = "over"
    SETTLED = "settled"


class LeaseEvent(StrEnum):
    PAUSE_TAKEN = "pause_taken"
    RAN_OUT = "ran_out"
    PARTIAL = "partial"
    RESUMED = "resumed"


_S, _E = LeaseState, LeaseEvent

# Beside each row: what is done. In HELD each renewal restarts the lease's time.
TRANSITIONS: Final[dict[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (_S.FREE, _E.PAUSE_TAKEN): _S.HELD,
    (_S.HELD, _E.PAUSE_TAKEN): _S.HELD,  # its time begins anew
    (_S.OVER, _E.PAUSE_TAKEN): _S.HELD,  # with peer ranks, the core takes its vote back
    (_S.SETTLED, _E.PAUSE_TAKEN): _S.HELD,
    (_S.HELD, _E.RAN_OUT): _S.OVER,  # the update is given up: restored, or partial
    # The engine lacks weights: it stays paused, and its requests are ended.
    (_S.OVER, _E.PARTIAL): _S.SETTLED,
    (_S.HELD, _E.RESUMED): _S.FREE,
    (_S.OVER, _E.RESUMED): _S.FREE,  # on request, or without peer ranks; or the cores have resumed
    (_S.SETTLED, _E.RESUMED): _S.FREE,
}


class EngineLease(StateMachine[LeaseState, LeaseEvent]):
    """Tracks the pause lease of one engine.

    Args:
        has_peers: whether the engine's DP group has other ranks.

    Attributes:
        has_peers: as given.
    """

    def __init__(self, *, has_peers: bool = False) -> None:
        super().__init__("engine lease", TRANSITIONS, _S.FREE)
        self.has_peers: Final = has_peers
        self._lease_ms = 0.0
        self._renewed_ms = 0.0
        self._tried_ms = -LEASE_RETRY_MS

    def begin(self, lease_ms: float, now_ms: float) -> None:
        """Begins the lease of a PAUSE_LOCAL. It lasts ``lease_ms``, unless it is renewed."""
        self._go(_E.PAUSE_TAKEN)
        self._lease_ms = lease_ms
        self._renewed_ms = now_ms

    def renew(self, now_ms: float) -> None:
        """Renews the lease, unless it is over.

        A lease that is over stays over: the engine's core may act on its end.
        """
        if self.over_ms is not None and now_ms < self.over_ms:
            self._renewed_ms = now_ms

    def end(self) -> None:
        """Ends the lease, because the engine has resumed."""
        self._go(_E.RESUMED)

    def run_out(self) -> None:
        """Marks the lease as expired."""
        self._go(_E.RAN_OUT)

    def stay_paused(self) -> None:
        """Keeps the engine paused until an update brings whole weights."""
        self._go(_E.PARTIAL)

    @property
    def over_ms(self) -> float | None:
        """When the present lease ends; None: no lease runs."""
        return self.ran_out_ms if self.state is _S.HELD else None

    @property
    def ran_out_ms(self) -> float:
        """When the present lease ends, or the last one ended."""
        return self._renewed_ms + self._lease_ms

    @property
    def again_ms(self) -> float | None:
        """When to try again to end a pause whose lease is over; None: never."""
        return self._tried_ms + LEASE_RETRY_MS if self.state is _S.OVER else None

    def record_attempt(self, now_ms: float) -> None:
        """Records an attempt to end the pause; the next one follows after a second."""
        self._tried_ms = now_ms

    @property
    def is_decided_by_cores(self) -> bool:
        """Whether cores may end the pause at any time: no update may begin."""
        return self.has_peers and self.state is _S.OVER
