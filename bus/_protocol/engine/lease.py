"""Ends an engine's pause if its lease expires; runs in the engine's sidecar.

PAUSE_LOCAL starts the lease. The broker's answer to a heartbeat renews it, if the answer names the
pause. The broker names the pause only while the owning trainer is alive. So the lease expires if
the trainer, the broker or the connection is lost.

The ranks of a DP group end their leases together, by LEASE_VOTE messages between their sidecars. A
vote carries the rank's *position*:

========= ==================================================================================
held      its lease has not expired
pausing   its lease has expired, but its pause call or the undo of an update has not returned
clean     its lease has expired, its pause is complete, and its weights are those of ``version``
partial   its weights are incomplete
running   it is not paused, and serves ``version``
========= ==================================================================================

Invariants:

- A rank resumes by itself only if, since its own lease expired, every peer rank has voted clean or
  running at the same version.
- A rank that has voted clean begins no update and no other pause before it resumes, or receives the
  vote of a partial peer rank. So no rank generates while another rank's weights change.
- A running rank that receives the vote of a pausing peer rank pauses, too: a pause call returns
  only when all ranks pause.
- A rank without the votes of all peer ranks stays paused, and logs which ranks it waits for. The
  exception: engine cores with lease pages may end the pause without their sidecars
  (see :meth:`~bus._protocol.engine.session.EngineSession.held_for_ms`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bus._protocol.core.state_table import StateMachine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.messages import LeasePosition, LeaseVote

# How often a rank asks its peer ranks, and retries a failed resume.
LEASE_RETRY_MS: Final = 1000.0


class LeaseState(StrEnum):
    """The state of a lease. SETTLED: it is over, and the engine stays paused."""

    FREE = "free"
    HELD = "held"
    OVER = "over"
    SETTLED = "settled"


class LeaseEvent(StrEnum):
    """Events that change a lease's state."""

    PAUSE_TAKEN = "pause_taken"
    RAN_OUT = "ran_out"
    PARTIAL = "partial"
    RESUMED = "resumed"


_S, _E = LeaseState, LeaseEvent

# Beside each row: what is done. In HELD each renewal restarts the lease's time. In OVER a rank
# sends LEASE_VOTE to every peer rank once a second.
TRANSITIONS: Final[dict[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (_S.FREE, _E.PAUSE_TAKEN): _S.HELD,
    (_S.HELD, _E.PAUSE_TAKEN): _S.HELD,  # its time begins anew
    (_S.OVER, _E.PAUSE_TAKEN): _S.HELD,  # after voting clean, it waits for the resume
    (_S.SETTLED, _E.PAUSE_TAKEN): _S.HELD,
    (_S.HELD, _E.RAN_OUT): _S.OVER,  # the update is given up: restored, or partial
    # This rank or a peer rank lacks weights: it stays paused, and its requests are ended.
    (_S.OVER, _E.PARTIAL): _S.SETTLED,
    (_S.HELD, _E.RESUMED): _S.FREE,
    (_S.OVER, _E.RESUMED): _S.FREE,  # on request; or all ranks are clean or running
    (_S.SETTLED, _E.RESUMED): _S.FREE,
}


class EngineLease(StateMachine[LeaseState, LeaseEvent]):
    """Tracks the pause lease of one engine.

    Args:
        rank: the engine's rank in its DP group.
        size: how many ranks the DP group has.

    Attributes:
        peers: the other ranks of the DP group.
        clean_said: this rank has voted "clean" since its lease expired.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__("engine lease", TRANSITIONS, _S.FREE)
        self.rank = rank
        self.peers: Final = tuple(each for each in range(size) if each != rank)
        self.clean_said = False
        self._lease_ms = 0.0
        self._renewed_ms = 0.0
        self._tried_ms = -LEASE_RETRY_MS
        self._votes: dict[int, LeaseVote] = {}

    def begin(self, lease_ms: float, now_ms: float) -> None:
        """Begins the lease of a PAUSE_LOCAL. It lasts ``lease_ms``, unless it is renewed."""
        self._go(_E.PAUSE_TAKEN)
        self._lease_ms = lease_ms
        self._renewed_ms = now_ms

    def renew(self, now_ms: float) -> None:
        """Renews the lease, unless it is over.

        A lease that is over stays over: peer ranks, or the engine itself, may act on its end.
        """
        if self.over_ms is not None and now_ms < self.over_ms:
            self._renewed_ms = now_ms

    def end(self) -> None:
        """Ends the lease, because the engine has resumed."""
        self._go(_E.RESUMED)
        self.clean_said = False

    def run_out(self) -> None:
        """Marks the lease as expired, and discards all earlier votes of peer ranks."""
        self._go(_E.RAN_OUT)
        self.clean_said = False
        self._votes.clear()

    def stay_paused(self) -> None:
        """Keeps the engine paused until an update brings whole weights."""
        self._go(_E.PARTIAL)
        self.clean_said = False

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
    def has_promised(self) -> bool:
        """Whether this rank has voted "clean": no update or other pause may begin."""
        return self.state is _S.OVER and self.clean_said

    def on_vote(self, vote: LeaseVote) -> None:
        """Records a peer rank's vote."""
        self._votes[vote.dp_rank] = vote

    def all_agree(self, version: int) -> bool:
        """Returns whether every peer rank has voted clean or running, at this version."""
        return all(
            self._position(rank) in ("clean", "running") and self._votes[rank].version == version
            for rank in self.peers
        )

    def any_partial(self, version: int) -> bool:
        """Returns whether a vote forbids a resume: a rank is partial, or has another version."""
        return any(
            vote.position == "partial"
            or (vote.position in ("clean", "running") and vote.version != version)
            for vote in self._votes.values()
        )

    def missing(self) -> Iterable[tuple[int, str]]:
        """Returns the peer ranks whose votes do not allow a resume, or are missing.

        Each rank's number comes with its last vote's position (see the module); empty: no vote yet.
        """
        return [
            (rank, self._position(rank))
            for rank in self.peers
            if self._position(rank) not in ("clean", "running")
        ]

    def _position(self, rank: int) -> LeasePosition | str:
        vote = self._votes.get(rank)
        return "" if vote is None else vote.position
