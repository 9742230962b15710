"""Lets the ranks of a DP group end a pause together, by votes in their store.

Sidecars renew the lease of a pause. Once a lease is over, the engine cores alone decide, because
only they still act when sidecars, broker and trainer are gone. A rank must never resume alone: its
resume waits for all ranks, and a rank that steps without the others hangs in a collective.

The store is the one by which the ranks found each other (``dp_store`` of vLLM; the rendezvous of
the embedded engine). It works across hosts. It lives in the process of rank 0, and without rank 0
no rank can step, so its loss loses nothing.

**Rounds.** The ranks vote in numbered rounds. In the store, a round has one vote of each rank, and
one *end*, which is written once (``compare_set``): ``ended`` or ``void``. A later round begins when
the end is written. A vote says whether the rank's weights are complete, and of which version. It is
final: the rank changes no weights and begins no other pause until the round has its end.

======== ========= ======== ====================================================================
state    event     next     when
======== ========= ======== ====================================================================
HELD     VOTE      VOTED    the lease is over, the pause is complete, what the update had begun
                            is undone; or the rank waits for the others in a resume; or another
                            rank has voted, and this one stays without complete weights
VOTED    VOID      HELD     the end is ``void``: some rank has taken its vote back
VOTED    END       DECIDED  the end is ``ended``: every rank has voted
DECIDED  DONE      HELD     the rank has done what was decided
======== ========= ======== ====================================================================

What was decided follows from the votes alone: all ranks resume if all weights are complete and of
one version; otherwise all are quarantined. A vote without a version fits every version.

Invariants:

- A rank acts on a decision only if every rank has voted in that round. A rank without a vote,
  because its core is dead or its lease was renewed, keeps all of them paused.
- A rank takes its vote back (its lease was renewed, or it was resumed on request) only by writing
  ``void``. If ``ended`` was written first, the rank acts on the decision, whatever its new lease
  says. So all ranks act, or none.
- A rank that has resumed since its vote has done what was decided: a resume is one of all ranks.
  So the vote keeps the rank from no update of a later pause.
  So votes count together only if the ranks have resumed equally often before; else the round is
  void.
- A sidecar that restarts writes a new lease. That takes the vote back, and the rank votes again
  when the new lease is over.
- A rank whose pause is not complete, perhaps because a peer rank was never asked to pause, marks
  the round as ``pausing``, or as ``stuck`` once its lease is over. A running rank pauses, too, if
  it finds ``stuck``, or if it finds ``pausing`` and its own lease is over: its sidecar died before
  the pause call. Without a lease it votes without a version.

Only the core's thread leaves HELD and DECIDED, except in a rank that waits in a resume, whose
thread is blocked. Only the thread that calls :meth:`RankLease.exchange` uses the store, and leaves
VOTED. So a store that does not answer never blocks a core.
"""

from __future__ import annotations

import threading
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bus._protocol.core.state_table import StateMachine

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar._shared_pages.pause_lease import LeaseOutcome, OutcomeState, PauseLease

_KEYS: Final = "wavebus/lease/"
_ENDED: Final = b"ended"
_VOID: Final = b"void"
_PAUSING, _STUCK = b"pausing", b"stuck"
ALL_WHOLE: Final = "no sidecar renewed the lease, and all ranks have complete weights"
INCOMPLETE: Final = "its weights are incomplete"


class Store(Protocol):
    """The part of a store of ``torch.distributed`` that an agreement uses."""

    def set(self, key: str, value: str) -> None:
        """Sets a key's value."""

    def get(self, key: str) -> bytes:
        """Returns a key's value; waits for a key that is missing."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether the store has all these keys."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key's value if it is as expected (empty: missing); returns its value then."""


class Vote(msgspec.Struct, frozen=True):
    """The vote of one rank.

    Attributes:
        whole: whether the rank's weights are complete.
        version: the version of its weights; None fits every version.
        resumes: how often the rank had resumed before this vote.
    """

    whole: bool
    version: int | None = None
    resumes: int = 0


class AgreementState(StrEnum):
    """The state of a rank in an agreement; see the module's table."""

    HELD = "held"
    VOTED = "voted"
    DECIDED = "decided"


class AgreementEvent(StrEnum):
    """Events that change a rank's state in an agreement."""

    VOTE = "vote"
    VOID = "void"
    END = "end"
    DONE = "done"


_S, _E = AgreementState, AgreementEvent

TRANSITIONS: Final[dict[tuple[AgreementState, AgreementEvent], AgreementState]] = {
    (_S.HELD, _E.VOTE): _S.VOTED,
    (_S.VOTED, _E.VOID): _S.HELD,
    (_S.VOTED, _E.END): _S.DECIDED,
    (_S.DECIDED, _E.DONE): _S.HELD,
}


class LeaseAgreement(StateMachine[AgreementState, AgreementEvent]):
    """Votes for one rank; all methods but :meth:`vote` and :meth:`finish` use the store.

    Attributes:
        decision: in DECIDED: what all ranks do, and why.
        waits_for: the ranks without a vote in this round, in words; empty: none.
        is_pausing: whether some rank's pause is not complete, as of the last exchange.
        is_stuck: whether the lease of such a rank is over.
        is_called: whether some rank has voted in this round, as of the last exchange.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        super().__init__("lease agreement", TRANSITIONS, _S.HELD)
        self._rank, self._size, self._store = rank, size, store
        self._round = 0
        self._own = Vote(whole=False)
        self._posted = False
        self._mark = b""
        self.decision: tuple[OutcomeState, str] = ("waiting", "")
        self.waits_for = ""
        self.is_pausing = self.is_stuck = self.is_called = False

    def vote(self, vote: Vote) -> None:
        """Gives this rank's vote; it reaches the store with the next exchange."""
        self._own, self._posted = vote, False
        self._go(_E.VOTE)

    def finish(self) -> None:
        """Records that this rank has carried out the decision."""
        self._go(_E.DONE)

    def exchange(self, *, keeps: bool, pausing: bool, over: bool) -> None:
        """Exchanges votes with the other ranks; may block for as long as the store does.

        Args:
            keeps: False takes this rank's vote back, if there is no decision yet.
            pausing: whether this rank's pause is not complete.
            over: whether this rank's lease is over.
        """
        while self.state is _S.HELD and self._store.check([self._key("end")]):
            self._next_round()
        self._exchange_mark((_STUCK if over else _PAUSING) if pausing else b"")
        if self.state is not _S.VOTED:
            return
        while self._store.check([self._key("end")]) and not self._posted:
            self._next_round()
        if not keeps:
            self._end(_VOID)
            return
        if not self._posted:
            text = msgspec.json.encode(self._own).decode()
            self._store.set(self._key(f"vote/{self._rank}"), text)
            self._store.set(self._key("called"), "")
            self._posted = True
        votes = self._votes()
        missing = [f"rank {rank}" for rank, vote in votes.items() if vote is None]
        self.waits_for = ", ".join(missing)
        if missing and not self._store.check([self._key("end")]):
            return
        resumes = {vote.resumes for vote in votes.values() if vote is not None}
        self._end(_ENDED if len(resumes) == 1 else _VOID)

    def _end(self, end: bytes) -> None:
        """Ends the round; the first rank to do so decides how."""
        if self._store.compare_set(self._key("end"), "", end.decode()) == _ENDED:
            self.decision = self._decide()
            self._next_round()
            self._go(_E.END)
        else:
            self._next_round()
            self._go(_E.VOID)

    def _next_round(self) -> None:
        self._round += 1
        self._posted = self.is_pausing = self.is_stuck = self.is_called = False
        self._mark = b""

    def _exchange_mark(self, own: bytes) -> None:
        """Raises the round's mark to this rank's mark, or withdraws this rank's old mark."""
        key = self._key("mark")
        found = self._store.get(key) if self._store.check([key]) else b""
        marks = (b"", _PAUSING, _STUCK)
        if marks.index(own) > marks.index(found) or (found == self._mark != own):
            self._store.set(key, own.decode())
            found = own
        self._mark = own
        self.is_pausing, self.is_stuck = found != b"", found == _STUCK
        self.is_called = self._store.check([self._key("called")])

    def _votes(self) -> dict[int, Vote | None]:
        found: dict[int, Vote | None] = {}
        for rank in range(self._size):
            key = self._key(f"vote/{rank}")
            voted = self._store.check([key])
            found[rank] = msgspec.json.decode(self._store.get(key), type=Vote) if voted else None
        return found

    def _decide(self) -> tuple[OutcomeState, str]:
        versions: dict[int, int] = {}
        for rank, vote in self._votes().items():
            assert vote is not None, "a round ends when all ranks have voted"
            if not vote.whole:
                return "quarantined", f"rank {rank}: {INCOMPLETE}"
            if vote.version is not None:
                versions.setdefault(vote.version, rank)
        if len(versions) > 1:
            return "quarantined", "ranks serve different versions: " + ", ".join(
                f"rank {rank} serves {version}" for version, rank in versions.items()
            )
        return "resumed", ALL_WHOLE

    def _key(self, name: str) -> str:
        return f"{_KEYS}{self._round}/{name}"


class LeaseRecord(Protocol):
    """The fields of a pause lease in shared memory that a rank's engine core reads."""

    def lease(self) -> PauseLease | None:
        """Returns the sidecar's lease."""

    def outcome(self) -> LeaseOutcome | None:
        """Returns the core's last action because of an expired lease."""

    def write_outcome(self, serial: int, state: OutcomeState, reason: str) -> None:
        """Writes the core's action because of an expired lease."""


class RankCore(Protocol):
    """The engine core of one rank, as its lease uses it.

    Its methods are called on the core's own thread; its properties are read on any thread.
    """

    @property
    def resumes(self) -> int:
        """How often the core has resumed, with all ranks."""

    @property
    def is_resuming(self) -> bool:
        """Whether the core waits in a resume for other ranks."""

    @property
    def is_paused(self) -> bool:
        """Whether the core is paused or pausing."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have paused, and the core is idle."""

    def pause(self) -> None:
        """Begins a pause that keeps requests, without waiting for the other ranks."""

    def prepare(self, lease: PauseLease) -> None:
        """Undoes the changes of an unfinished update, and wakes memory; raises if impossible."""

    def resume(self) -> None:
        """Resumes, which waits for the other ranks; :meth:`prepare` has woken memory."""

    def quarantine(self) -> None:
        """Ends all requests with the tokens they have."""


class RankLease:
    """Ends the pause of one rank when its lease is over, together with the other ranks.

    Args:
        core: the rank's engine core.
        page: its lease page.
        agreement: the votes.
        log: called with (pause id, state, reason) when the reason changes.
    """

    def __init__(
        self,
        core: RankCore,
        page: LeaseRecord,
        agreement: LeaseAgreement,
        log: Callable[[str, OutcomeState, str], None],
    ) -> None:
        self._core, self._page, self._agreement, self._log = core, page, agreement, log
        self._lock = threading.Lock()  # a rank in a resume votes on the exchanging thread
        self._beside = False  # paused for a peer rank's sake; the sidecar has written no lease
        self._prepared = 0  # serial of the lease whose update was undone
        self._ended = -1  # serial of the lease under which the rank was quarantined by all
        self._voted: tuple[int, int, bool] = (0, 0, False)  # serial, resumes, in a resume

    @property
    def is_void(self) -> bool:
        """Whether the rank's vote counts, so that its weights must not change.

        A vote from before the last resume counts no more: all ranks have resumed since.
        """
        return self._agreement.state is not _S.HELD and self._core.resumes == self._voted[1]

    def is_due(self) -> bool:
        """Returns whether the core's thread must call :meth:`look`. Called on any thread."""
        lease, agreement = self._page.lease(), self._agreement
        return (
            agreement.state is _S.DECIDED
            or agreement.is_stuck
            or agreement.is_called
            or self._beside
            or (lease is not None and has_expired(lease))
        )

    def exchange(self) -> None:
        """Exchanges votes with the other ranks. Blocks; called on a thread of its own."""
        lease, agreement, core = self._page.lease(), self._agreement, self._core
        serial, resumes, resuming = self._voted
        with self._lock:
            if core.is_resuming and agreement.state is _S.DECIDED and core.resumes != resumes:
                agreement.finish()  # the rank has resumed since, and waits in a further resume
            if core.is_resuming and agreement.state is _S.HELD:
                self._vote(lease, whole=lease is None or not lease.partial, resuming=True)
                serial, resumes, resuming = self._voted
        keeps = core.resumes == resumes and (
            core.is_resuming
            if resuming
            else (lease.serial if lease else 0) == serial
            and (lease is None or has_expired(lease) or _stays_partial(lease))
        )
        agreement.exchange(
            keeps=keeps,
            pausing=core.is_paused and not core.is_complete,
            over=self._beside if lease is None else has_expired(lease),
        )

    def look(self) -> None:
        """Takes the action that the lease's state requires. Called on the core's thread."""
        lease, agreement, core = self._page.lease(), self._agreement, self._core
        if agreement.state is _S.DECIDED:
            self._carry_out(lease)
            return
        if not core.is_paused:
            self._beside = False
            over = lease is not None and has_expired(lease) and not lease.resuming
            if agreement.is_stuck or (over and agreement.is_pausing):
                self._beside = True
                core.pause()
            elif lease is not None and over:
                self._write(lease, "resumed", "the engine is not paused")
            return
        if not (has_expired(lease) if lease is not None else self._beside):
            lacks = lease is not None and _stays_partial(lease) and lease.serial != self._ended
            with self._lock:
                may_vote = agreement.state is _S.HELD and agreement.is_called and core.is_complete
                if lacks and may_vote:
                    self._vote(lease, whole=False)
            return
        if not core.is_complete:
            return
        with self._lock:
            if agreement.state is _S.HELD and (lease is None or lease.serial != self._ended):
                self._vote(lease, whole=self._is_whole(lease))
        if agreement.state is _S.VOTED and lease is not None:
            end = self._page.outcome()
            if end is None or end.serial != lease.serial or end.state == "waiting":
                waits = agreement.waits_for
                self._write(lease, "waiting", f"{waits} has not voted" if waits else "")

    def _vote(self, lease: PauseLease | None, *, whole: bool, resuming: bool = False) -> None:
        version = lease.version if lease is not None else None
        self._voted = (lease.serial if lease else 0, self._core.resumes, resuming)
        self._agreement.vote(Vote(whole, version, self._core.resumes))

    def _is_whole(self, lease: PauseLease | None) -> bool:
        if lease is None:
            return True
        reason = f"incomplete weights: {', '.join(lease.partial)}" if lease.partial else ""
        end = self._page.outcome()
        if end is not None and end.serial == lease.serial and end.state == "quarantined":
            return False
        if not reason and self._prepared != lease.serial:
            try:
                self._core.prepare(lease)
            except Exception as error:  # noqa: BLE001 - any failure leaves mixed weights
                reason = f"an update could not be undone: {error}"
            self._prepared = lease.serial
        if reason:
            self._core.quarantine()
            self._write(lease, "quarantined", reason)
        return not reason

    def _carry_out(self, lease: PauseLease | None) -> None:
        """Carries out the ranks' decision, even if the lease was renewed in between."""
        state, reason = self._agreement.decision
        if self._core.resumes != self._voted[1] or not self._core.is_paused:
            self._agreement.finish()  # it has resumed, with all ranks
            return
        if state == "quarantined":
            self._core.quarantine()
            self._ended = lease.serial if lease is not None else 0
        if lease is not None:
            self._write(lease, state, reason)
        self._beside = False
        self._agreement.finish()
        if state == "resumed":
            self._core.resume()

    def _write(self, lease: PauseLease, state: OutcomeState, reason: str) -> None:
        end = self._page.outcome()
        if end is None or (end.serial, end.state, end.reason) != (lease.serial, state, reason):
            self._page.write_outcome(lease.serial, state, reason)
            if reason:
                self._log(lease.pause_id, state, reason)


def _stays_partial(lease: PauseLease) -> bool:
    """Returns whether weights are missing and no update brings them, so that no rank may resume."""
    return bool(lease.partial) and not lease.begun


def has_expired(lease: PauseLease) -> bool:
    """Returns whether a lease is over."""
    return time.monotonic_ns() > lease.until_ns
