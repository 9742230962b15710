"""Ends the pause of embedded ranks together when a rank's lease is over.

The rules are those of :mod:`sidecar._lease_agreement`. The sidecar is in the rank's process, so the
lease is no shared page. It can still be over while the sidecar lives, because the broker is gone.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import bus.log
from bus.errors import EngineDead, EngineError
from sidecar._lease_agreement import LeaseAgreement, RankLease
from sidecar._shared_pages.pause_lease import LeaseInMemory

if TYPE_CHECKING:
    from sidecar._embedded.parallel.core import LockstepCore
    from sidecar._embedded.parallel.options import DataParallel
    from sidecar._embedded.update import Updater
    from sidecar._lease_agreement import Store
    from sidecar._shared_pages.pause_lease import OutcomeState, PauseLease

PERIOD_S: Final = 0.2
_STOP_PATIENCE_S: Final = 2.0


class EmbeddedLease:
    """Watches one rank's lease; implements :class:`sidecar._lease_agreement.RankCore`.

    Args:
        options: the rank's options.
        core: the rank's engine core.
        updater: carries out the core's updates.
        store: the ranks' store, in which only this object's thread votes.

    Attributes:
        page: the sidecar's lease, and what the core did when the lease was over.
    """

    def __init__(
        self, options: DataParallel, core: LockstepCore, updater: Updater, store: Store
    ) -> None:
        self.page = LeaseInMemory()
        self._core = core
        self._updater = updater
        self.resume = updater.resume
        self.quarantine = core.end_requests
        self._log = bus.log.logger(dp_group=options.group, dp_rank=options.rank)
        votes = LeaseAgreement(options.rank, options.size, store)
        self._rank = RankLease(self, self.page, votes, self._note)
        core.lease = self._rank
        self._asked = False  # the core is about to check the lease
        self._warned = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wavebus-lease-votes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the voting; a thread that waits for the store ends with the process."""
        self._closed.set()
        self._thread.join(_STOP_PATIENCE_S)

    # The core, as its lease uses it

    @property
    def resumes(self) -> int:
        return self._core.resumes

    @property
    def is_resuming(self) -> bool:
        return self._core.is_resuming

    @property
    def is_paused(self) -> bool:
        return self._core.is_paused

    @property
    def is_complete(self) -> bool:
        return self._core.is_pause_complete

    def pause(self) -> None:
        self._log.warning("pause_completed", detail="a peer rank was paused alone")
        self._core.join_pause()

    def prepare(self, lease: PauseLease) -> None:
        if lease.begun:
            try:
                self._updater.require_whole()  # the sidecar's call has not come
            except EngineError:
                self._updater.restore()
        if lease.asleep:
            self._core.memory.wake()

    # The thread that votes

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            try:
                self._rank.exchange()
                if self._rank.is_due() and not self._asked:
                    self._asked = True
                    self._core.call(self._look)
            except EngineDead:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may go well
                self._warn(error)

    def _look(self) -> None:
        """Checks the lease, on the core's thread."""
        self._asked = False
        try:
            self._rank.look()
        except EngineDead:
            raise
        except Exception as error:  # noqa: BLE001 - as above; the core must go on
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if repr(error) != self._warned and not self._closed.is_set():
            self._warned = repr(error)
            self._log.warning("lease_check_failed", detail=repr(error))

    def _note(self, pause_id: str, state: OutcomeState, reason: str) -> None:
        self._log.info("lease_outcome", update_id=pause_id, state=state, reason=reason)
