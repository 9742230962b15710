"""Writes an engine's lease page, and takes over a pause that an earlier sidecar left.

The lease is written before each engine call that may have to be undone. So if the sidecar dies, the
page names everything that must be undone.
"""

from __future__ import annotations

import os
import secrets
import time
from itertools import count
from typing import TYPE_CHECKING, Final

from bus._lora import PREFIX as ADAPTERS
from bus._protocol.core.effects import Note
from bus._protocol.engine.lease import LeaseState
from bus._protocol.engine.pause import EnginePauseState
from bus.errors import EngineError, wrong_state
from bus.messages import NackCode
from bus.operations import Restore
from sidecar._shared_pages.pause_lease import (
    AbandonedPause,
    Begun,
    LeaseOutcome,
    PauseLease,
    deadline_ns,
    is_alive,
)

if TYPE_CHECKING:
    from bus._protocol.engine.calls import SessionEffect
    from bus._protocol.engine.session import EngineSession
    from sidecar.engine import Engine

_SERIAL_BITS: Final = 52
_MIN_LEASE_MS: Final = 1000.0


class PauseLeaseWriter:
    """Writes the pause lease of one engine, for one sidecar process.

    Args:
        engine: the engine's adapter.
        session: the session machine, whose state the lease describes.
        dp_group: the DP group's name on the bus.
    """

    def __init__(self, engine: Engine, session: EngineSession, dp_group: str) -> None:
        self._engine = engine
        self._session = session
        self._dp_group = dp_group
        self._pid = os.getpid()
        self._serials = count(secrets.randbits(_SERIAL_BITS) + 1)
        self._serial = 0
        self._outcome: LeaseOutcome | None = None  # of the present pause: the engine has ended it
        self._waits_for = ""  # why the engine can't end the present pause, as logged

    def begin_pause(self) -> None:
        """Makes the next write begin a new lease, for a pause that is about to begin."""
        self._serial = 0

    def write(self, now_ms: float) -> list[SessionEffect]:
        """Writes the lease of the engine's pause; removes it if the engine is not paused.

        If the engine has ended the pause by itself, the session's state is corrected as soon as no
        call is under way.

        Args:
            now_ms: the session's time, in ms.

        Returns:
            What follows from the engine's decision: notes for the log, and a call.
        """
        if self._session.pause.state is EnginePauseState.RUNNING:
            self._serial, self._outcome = 0, None
            self._engine.write_pause_lease(None)
            return []
        self._serial = self._serial or next(self._serials)
        self._outcome = end = self._engine.write_pause_lease(self._lease(now_ms))
        return self._on_outcome(end, now_ms) if end and self._session.at_rest else []

    def require_held(self) -> None:
        """Checks, as of the last :meth:`write`, that the engine has not ended its pause.

        Raises:
            EngineError: code ``wrong_state``: the engine has ended the pause by itself.
        """
        if (end := self._outcome) is not None:
            raise wrong_state(
                f"the pause's lease was over, and the engine is {end.state}: {end.reason}"
            )

    async def release(self, *, runs_on: bool = True) -> None:
        """Ends the pause and opens admission, where that is safe, when the sidecar ends.

        A rank of a DP group, and a sleeping engine, stays paused until its lease is over: a DP
        group resumes as one, and the trainer may be using the memory of a sleeping engine.
        Admission stays closed if weights are incomplete.

        Args:
            runs_on: True if the engine continues to run without this sidecar, and so needs open
                admission; False if the engine ends with it.
        """
        session, engine = self._session, self._engine
        if runs_on and session.admission.closed and not session.update.partial:
            await engine.admit(open=True)  # no sidecar is left that would open it
        if session.phase == "paused" and not session.lease.has_peers:
            await engine.resume()
            engine.write_pause_lease(None)

    async def take_over(self, left: AbandonedPause, now_ms: float) -> Note:
        """Takes over an engine that an earlier sidecar left paused.

        The pause is kept, so that the broker decides about it. An update that had begun is undone;
        if that is impossible, the engine is quarantined.

        Args:
            left: the pause that was found, with its lease.
            now_ms: the session's time, in ms.

        Returns:
            A note for the log.

        Raises:
            EngineError: code ``name_taken``: another live sidecar has paused the engine.
        """
        lease, partial, engine = left.lease, left.partial, self._engine
        is_held = lease.writer_pid != self._pid and is_alive(lease.writer_pid)
        if is_held and lease.until_ns > time.monotonic_ns():
            raise EngineError(
                f"another sidecar, process {lease.writer_pid}, has paused this engine (pause "
                f"{lease.pause_id}), and an engine has only one sidecar: stop the other one",
                code=NackCode.NAME_TAKEN,
            )
        if lease.begun and lease.begun != "adapter" and not partial:
            try:
                await engine.perform(Restore(lease.begun))
            except EngineError:
                partial = (lease.begun,)
        if partial:
            await engine.admit(open=False)
            await engine.abort_requests()
        left_ms = (lease.until_ns - time.monotonic_ns()) / 1e6
        self._session.on_found_paused(
            lease.pause_id,
            max(left_ms, _MIN_LEASE_MS),
            now_ms,
            partial=partial,
            asleep=lease.asleep,
        )
        fields = {
            "update_id": lease.pause_id,
            "phase": self._session.phase,
            "partial": list(partial),
        }
        return Note("found_paused", "warning", fields)

    def _on_outcome(self, end: LeaseOutcome, now_ms: float) -> list[SessionEffect]:
        session = self._session
        fields: dict[str, object] = {"update_id": session.pause.update_id}
        known = session.lease.state is LeaseState.SETTLED
        if end.state == "waiting" or (end.state == "quarantined" and known):
            over_ms = session.lease.over_ms
            if over_ms is None or over_ms <= now_ms:
                if end.state != "waiting" or end.reason in ("", self._waits_for):
                    return []
                self._waits_for = end.reason
                return [Note("lease_undecided", "warning", {**fields, "waits_for": end.reason})]
            # The broker is reachable again, and controls the pause as before.
            effects: list[SessionEffect] = []
        elif end.state == "resumed":
            effects = session.on_core_resumed(now_ms)
        else:
            effects = session.on_core_quarantined(now_ms)
        self._serial, self._waits_for = 0, ""
        fields |= {"state": end.state, "reason": end.reason}
        return [Note("engine_decided", "warning", fields), *effects]

    def _lease(self, now_ms: float) -> PauseLease:
        session, update = self._session, self._session.update
        part, partial = update.part_in_place, update.partial
        begun: Begun = ""
        if part:
            begun = "draft" if part == "draft" else "model"
            if part.startswith(ADAPTERS):
                begun = "adapter"
            elif update.has_loaded:
                partial = partial | {part}
        return PauseLease(
            serial=self._serial,
            pause_id=session.pause.update_id,
            until_ns=deadline_ns(session.held_for_ms(now_ms)),
            writer_pid=self._pid,
            dp_group=self._dp_group,
            version=session.version,
            begun=begun,
            partial=tuple(sorted(partial)),
            asleep=not session.memory.awake,
            resuming=session.pause.state is EnginePauseState.RESUMING,
        )
