"""Carries out a client's updates.

Clients repeat calls that may have succeeded, call finish after a failed update, and disconnect in
the middle of it::

    state      call                       next       then
    NONE       start                      STARTED    nothing is known of the tensors yet
    STARTED    start, of the same client  STARTED    the same answer
    STARTED    update_weights             LOADING    ARM with the tensors, the transfer
    LOADING    update_weights, further    LOADING    ARM_PART with these tensors, the transfer
               tensors
    LOADING    update_weights, repeated   LOADING    refused
    STARTED    finish                     NONE       nothing was sent. Refused, if an earlier
                                                     update was loaded, and not finished, or if it
                                                     has a label
    STARTED    a folder is sent           FAILED     refused: a folder is an update by itself
    STARTED    silence                    FAILED     nothing was begun on the bus
    STARTED    init, shutdown             DONE       the same
    LOADING    finish                     DONE       UPDATE_FINISH, COMMIT
    LOADING    a call fails, or its       FAILED     ABORT; engines serve what they had
               client disconnects
    LOADING    resume, silence, init,     FAILED     the same
               shutdown
    any        update_weights, refused    (as above) the client's broadcast is ended, see below
    FAILED     finish, update_weights     FAILED     refused, with the update's error
    FAILED     start                      STARTED
    DONE       finish                     DONE       the same answer
    DONE       start                      STARTED

Invariants:

- No update is committed of which a call has failed.
- A start or init is refused while an update of another client is under way, or a call is at work.
- No engine enters a broadcast for tensors that another engine may still refuse.

A client may send an update in several calls. How many is unknown: if its first call lacks tensors,
the update is armed open, and engines check at the end that none is missing. If the same tensors
come again, the next one is armed at its first call with the tensors of all calls, which engines
know already. Then its calls must be the same again. In a client's pause each call is armed by
itself: a call that differs would leave engines with a part of the weights.

A client enters its broadcast while it sends ``update_weights``, and reads the answer only when the
broadcast has ended. So if the call is refused before an engine has entered it, all engines enter it
and discard what comes. Not so:

- for a repeated call of an update that is LOADING, or if another ``update_weights`` was answered
  while the call waited: it is a repeated one, or another client's, which is in a broadcast of its
  own, if in any,
- if engines may have entered the broadcast already, or the client has disconnected; a repeated call
  after that comes in FAILED, and ends the broadcast; a start closes the transport instead, or its
  tensors would be those of the old broadcast,
- for a repeated call whose broadcast was ended before.

If a broadcast can't be ended, the transport is closed. The answer says so, and so do the answers of
later calls in FAILED, until another transport is open.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from trainer_agent._gateway.http_update import (
    Caller,
    ClientBroadcasts,
    Conflict,
    HttpStage,
    HttpUpdate,
    read_tensors,
)
from trainer_agent._gateway.pickled_handles import read_info

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus._manifest import TensorMeta
    from bus.messages import Target
    from trainer_agent._gateway.agent import GatewayAgent
    from trainer_agent._gateway.client_session import ClientSession


class ClientUpdates:
    """The updates of HTTP clients, one at a time.

    Args:
        session: the membership of the bus.
        takes_pickles: whether pickled CUDA IPC handles are read.

    Attributes:
        label: the client's own name of the weights that were committed last; empty: none.
    """

    def __init__(self, session: ClientSession, *, takes_pickles: bool = False) -> None:
        self.label = ""
        self._takes_pickles = takes_pickles
        self._session = session
        self._update: HttpUpdate | None = None
        self._has_finished = False  # the last update; it may be finished again
        self._finishing: asyncio.Task[None] | None = None
        # Over the open communicator: the tensors of the last calls, and whether all were committed.
        self._manifests: dict[Target, list[list[TensorMeta]]] = {}
        self._committed: set[Target] = set()
        self._answered = 0  # how many `update_weights` have been
        self._broadcasts = ClientBroadcasts()
        session.on_undone, session.is_begun = self._on_undone, lambda: self._is_begun

    # -- the transport --------------------------------------------------------------

    async def open(self, info: Mapping[str, Any], caller: Caller) -> None:
        """Makes every engine join the client's communicator; undoes an update under way.

        Args:
            info: vLLM's ``init_info``.

        Raises:
            Conflict: another client's update is under way.
            UsageError: the sizes don't fit the group, or its engines were not started for this.
        """
        self._require_own(caller)
        async with self._session.call() as agent:
            await self._undo(agent, "init_weight_transfer_engine came before its end")
            self._discard_manifests()
            await agent.open_native(info)
            if self._update is not None:
                self._update.left = ""

    def _discard_manifests(self) -> None:
        self._manifests.clear()
        self._committed.clear()
        self._broadcasts.is_stranded = False

    async def close_transport(self) -> None:
        """Closes the communicator, whoever's it is; undoes an update under way."""
        async with self._session.call() as agent:
            await self._undo(agent, "shutdown_weight_transfer_engine came before its end")
            self._discard_manifests()
            await agent.close_native()

    async def _undo(self, agent: GatewayAgent, why: str) -> None:
        if agent.has_update:
            self._on_undone(why)
            await agent.undo_native()
        elif self._open_update() is not None:
            self._update, self._has_finished = None, True

    # -- updates ----------------------------------------------------------------------

    async def start(self, target: Target, caller: Caller) -> None:
        """Begins an update. A client that repeats it, or has begun one before and is gone, may.

        Raises:
            Conflict: another client's update is under way.
        """
        update = self._require_own(caller)
        async with self._session.call() as agent:
            if left := await self._broadcasts.close(agent):
                self._discard_manifests()
            if self._update is not update:
                self.require_none()
            elif self._is_begun and update is not None and update.target == target:
                return
            self._has_finished = False
            known = self._manifests.get(target, [])
            self._update = HttpUpdate(target, caller, time.monotonic(), left=left, known=known)

    async def receive(self, info: object) -> None:
        """Has all engines check, receive and load tensors of the update.

        Args:
            info: vLLM's ``update_info``.

        Raises:
            Conflict: no update was begun, or it has failed.
            ManifestRefused: an engine's model doesn't take these tensors; none has entered a
                collective.
            WavebusError: the update has failed. Engines serve what they had.
        """
        began, answered = self._update, self._answered
        async with self._session.call() as agent:
            repeats = answered != self._answered  # another call was answered while it waited
            try:
                await self._receive(agent, info, began)
            except Exception as error:
                if agent.has_broadcasts and not repeats:
                    await self._broadcasts.end(agent, self._update, info, error)
                self._answered += 1
                raise
            self._answered += 1

    async def _receive(self, agent: GatewayAgent, info: object, began: HttpUpdate | None) -> None:
        update = self._require_update()
        if update is not began or update.repeats(info):
            raise Conflict(f"{update} has these tensors already")
        update.stage, given = HttpStage.LOADING, info
        entered = False
        try:
            if isinstance(info, dict):
                info = await asyncio.to_thread(read_info, info, allowed=self._takes_pickles)
            described, metas = read_tensors(info, update.next_known)
            was_committed = update.target in self._committed
            self._committed.discard(update.target)
            await update.arm(agent, metas, was_committed=was_committed)
            entered = True
            await agent.receive_native(described)
        except BaseException as error:
            update.fail(str(error) or "its client disconnected")
            if update.left:
                error.add_note(update.left)
            if isinstance(error, asyncio.CancelledError) and not entered:
                self._broadcasts.is_stranded = agent.has_broadcasts
            raise
        update.calls.append(metas)
        update.infos.append(given)
        self._manifests[update.target] = update.calls

    async def finish(self, label: str) -> None:
        """Commits the update: all engines serve the new weights when this returns.

        It goes on if the client disconnects, and a repeated call gets the same answer.

        Args:
            label: the client's own name of the weights.

        Raises:
            Conflict: no update was begun, or it has failed.
        """
        if self._finishing is None:
            if self._update is None and self._has_finished:
                return
            update = self._require_update()
            if update.stage is HttpStage.STARTED:
                if self._session.is_loading:
                    raise Conflict("tensors that came before the last start were not finished")
                if label:
                    raise Conflict(f"no tensors have come that could be named {label[:80]!r}")
                self._update = None
                return
            self._finishing = asyncio.create_task(self._commit(update, label))
            self._finishing.add_done_callback(self._on_finished)
        await asyncio.shield(self._finishing)

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        self._finishing = None
        if not task.cancelled():
            task.exception()  # the client that waits gets it

    async def _commit(self, update: HttpUpdate, label: str) -> None:
        async with self._session.call() as agent:
            try:
                if len(update.calls) < len(update.planned):
                    await agent.undo_native()
                    raise Conflict(f"{len(update.calls)} of {len(update.planned)} calls have come")
                version = await agent.commit_native(label)
            except BaseException as error:
                update.fail(str(error))
                raise
        self._committed.add(update.target)
        self._update, self._has_finished, self.label = None, True, label or str(version)

    # -- checks -----------------------------------------------------------------------

    @property
    def _is_begun(self) -> bool:
        return self._update is not None and self._update.stage is HttpStage.STARTED

    def _require_update(self) -> HttpUpdate:
        update = self._update
        if update is None:
            raise Conflict("no update is under way: start_weight_update comes first")
        if update.stage is HttpStage.FAILED:
            failed = Conflict(f"the update failed, and is not served: {update.error}")
            if update.left:
                failed.add_note(update.left)
            raise failed
        return update

    def _open_update(self) -> HttpUpdate | None:
        """Returns the update that was begun, and has neither ended nor failed."""
        update = self._update
        return None if update is None or update.stage is HttpStage.FAILED else update

    def _require_own(self, caller: Caller) -> HttpUpdate | None:
        """Returns the update under way, if there is one; it is the caller's, or its client is gone.

        Raises:
            Conflict: it is another client's, or a call is at work.
        """
        update = self._open_update()
        if update is not None:
            same = update.caller.connection is caller.connection or update.caller.is_gone()
            if not same or self._session.is_busy:
                raise Conflict(f"{update} is under way")
        return update

    def require_none(self) -> None:
        """Checks that no update is under way.

        Raises:
            Conflict: one is.
        """
        update = self._open_update()
        if update is not None:
            raise Conflict(f"{update} is under way")

    def require_no_start(self, caller: Caller) -> None:
        """Checks that no update is under way, for a call that is a whole update by itself.

        Raises:
            Conflict: one is. If this caller has only begun it, it fails, so that nobody takes it
                for this call.
        """
        if (update := self._require_own(caller)) is None:
            return
        if not self._is_begun:
            raise Conflict(f"{update} is under way")
        update.fail("a folder needs no start_weight_update, and no finish_weight_update")
        raise Conflict(f"{update.error}: send it again, without them")

    def require_not_loading(self) -> None:
        """Checks that no update has begun on the bus.

        Raises:
            Conflict: one has.
        """
        if self._session.is_loading:
            raise Conflict(f"{self._update} is under way")

    def _on_undone(self, reason: str) -> None:
        if self._update is not None:
            self._update.fail(reason)
