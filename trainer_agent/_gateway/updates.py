"""Carries out the updates whose tensors a client sends.

Clients repeat calls that may have succeeded, call finish after a failed update, and disconnect in
the middle of an update::

    state      call                       next       then
    NONE       start                      STARTED    the tensors are still unknown
    STARTED    start, of the same client  STARTED    the same answer
    STARTED    update_weights             LOADING    ARM with the tensors, the transfer
    LOADING    update_weights, further    LOADING    ARM_PART with these tensors, the transfer
               tensors
    LOADING    update_weights, repeated   LOADING    refused
    STARTED    finish                     NONE       nothing was sent. Refused if an earlier update
                                                     was loaded but not finished, or if the call
                                                     has a label
    STARTED    a folder is sent           FAILED     refused: a folder is an update by itself
    STARTED    silence                    FAILED     the bus has no update to abort
    STARTED    init, shutdown             DONE       the bus has no update to abort
    LOADING    finish                     DONE       UPDATE_FINISH, COMMIT
    LOADING    a call fails, or its       FAILED     ABORT; engines serve their old weights
               client disconnects
    LOADING    resume, silence, init,     FAILED     ABORT; engines serve their old weights
               shutdown
    any        update_weights, refused    (as above) the client's broadcast is ended (below)
    FAILED     finish, update_weights     FAILED     refused, with the update's error
    FAILED     start                      STARTED
    DONE       finish                     DONE       the same answer
    DONE       start                      STARTED

Invariants:

- If a call of an update fails, the update is never committed.
- A start or init is refused while another client's update is under way, or a call is carried out.
- No engine enters a broadcast for tensors that another engine may still refuse.

A client may send an update in any number of calls. If the first call lacks tensors of the model,
the update is armed open, and engines check at the end that no tensor is missing. If the calls of
two updates bring the same tensors, the second update is armed at its first call with the tensors of
all calls, which engines have checked before. Then a call with other tensors fails the update. In a
client's pause, each call is armed by itself, because a failure would leave engines with a part of
the weights.

A client enters a broadcast while it sends ``update_weights``, and reads the answer only when the
broadcast has ended. So if the call is refused before any engine has entered the broadcast, all
engines enter, and discard the tensors (a drain). There is no drain

- for a repeated call of an update that is LOADING, or if another ``update_weights`` was answered
  while the call waited: the client is then in no broadcast, or in that of another call,
- if engines may have entered the broadcast already, or the client has disconnected. A repeated call
  after a disconnect finds the update FAILED, and is drained. A start closes the transport instead,
  because its tensors would be received as those of the old broadcast,
- for a repeated call that was drained before.

If a drain fails, the transport is closed. The call's answer says so, and so do the answers of later
calls in FAILED, until another transport is open.
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
        takes_pickles: whether pickled CUDA IPC handles are read.

    Attributes:
        label: the client's own name of the last committed weights; empty: none were committed.
    """

    def __init__(self, session: ClientSession, *, takes_pickles: bool = False) -> None:
        self.label = ""
        self._takes_pickles = takes_pickles
        self._session = session
        self._update: HttpUpdate | None = None
        self._has_finished = False  # the last update is done; a repeated finish succeeds
        self._finishing: asyncio.Task[None] | None = None
        # The tensors of the last update's calls over the open communicator, and the targets whose
        # last update was committed.
        self._manifests: dict[Target, list[list[TensorMeta]]] = {}
        self._committed: set[Target] = set()
        self._answered = 0  # number of `update_weights` that were answered
        self._broadcasts = ClientBroadcasts()
        session.on_undone, session.is_begun = self._on_undone, lambda: self._is_begun

    # -- the transport --------------------------------------------------------------

    async def open(self, info: Mapping[str, Any], caller: Caller) -> None:
        """Makes every engine join the client's communicator; undoes an update under way.

        Args:
            info: vLLM's ``init_info``.

        Raises:
            Conflict: another client's update is under way.
            UsageError: the communicator's size doesn't fit the group, or its engines were started
                without this backend.
        """
        self._require_own(caller)
        async with self._session.call() as agent:
            await self._undo(agent, "a new transport was opened before finish_weight_update")
            self._discard_manifests()
            await agent.open_native(info)
            if self._update is not None:
                self._update.left = ""

    def _discard_manifests(self) -> None:
        self._manifests.clear()
        self._committed.clear()
        self._broadcasts.is_stranded = False

    async def close_transport(self) -> None:
        """Closes the communicator of any client, and undoes an update under way."""
        async with self._session.call() as agent:
            await self._undo(agent, "the transport was shut down before finish_weight_update")
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
        """Begins an update; a repeated call of the same client changes nothing.

        Raises:
            Conflict: an update of another client is under way, which is still connected.
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
            Conflict: no update was started, or it has failed.
            ManifestRefused: an engine's model doesn't take these tensors; no engine has entered a
                collective.
            WavebusError: the update has failed. Engines serve their old weights.
        """
        began, answered = self._update, self._answered
        async with self._session.call() as agent:
            repeats = answered != self._answered  # another call was answered while this one waited
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
            raise Conflict(f"{update} has received these tensors already")
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
            update.fail(str(error) or "the client disconnected")
            if update.left:
                error.add_note(update.left)
            if isinstance(error, asyncio.CancelledError) and not entered:
                self._broadcasts.is_stranded = agent.has_broadcasts
            raise
        update.calls.append(metas)
        update.infos.append(given)
        self._manifests[update.target] = update.calls

    async def finish(self, label: str) -> None:
        """Commits the update; returns when all engines serve the new weights.

        The commit continues if the client disconnects. A repeated call gets the same answer.

        Args:
            label: the client's own name of the weights.

        Raises:
            Conflict: no update was started, or it has failed.
        """
        if self._finishing is None:
            if self._update is None and self._has_finished:
                return
            update = self._require_update()
            if update.stage is HttpStage.STARTED:
                if self._session.is_loading:
                    raise Conflict("an update before the last start_weight_update never finished")
                if label:
                    raise Conflict(f"weight_version={label[:80]!r}: this update has no tensors")
                self._update = None
                return
            self._finishing = asyncio.create_task(self._commit(update, label))
            self._finishing.add_done_callback(self._on_finished)
        await asyncio.shield(self._finishing)

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        self._finishing = None
        if not task.cancelled():
            task.exception()  # marks the error as seen; the client that waits receives it

    async def _commit(self, update: HttpUpdate, label: str) -> None:
        async with self._session.call() as agent:
            try:
                came, planned = len(update.calls), len(update.planned)
                if came < planned:
                    await agent.undo_native()
                    raise Conflict(f"only {came} of {planned} calls of update_weights have come")
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
            raise Conflict("no update is under way: call start_weight_update first")
        if update.stage is HttpStage.FAILED:
            failed = Conflict(f"the update failed, and engines don't serve it: {update.error}")
            if update.left:
                failed.add_note(update.left)
            raise failed
        return update

    def _open_update(self) -> HttpUpdate | None:
        """Returns the update under way, if there is one."""
        update = self._update
        return None if update is None or update.stage is HttpStage.FAILED else update

    def _require_own(self, caller: Caller) -> HttpUpdate | None:
        """Returns the update under way, if any, for a caller that may replace it.

        Raises:
            Conflict: the update is of another connected client, or a call is being carried out.
        """
        update = self._open_update()
        if update is not None:
            same = update.caller.connection is caller.connection or update.caller.is_gone()
            if not same or self._session.is_busy:
                raise Conflict(f"{update} is under way")
        return update

    def require_none(self) -> None:
        """Raises ``Conflict`` if an update is under way."""
        update = self._open_update()
        if update is not None:
            raise Conflict(f"{update} is under way")

    def require_no_start(self, caller: Caller) -> None:
        """Checks that no update is under way, before a call that is a whole update.

        Raises:
            Conflict: an update is under way. If this caller has only started it, that update
                fails, so that a later finish does not seem to belong to this call.
        """
        if (update := self._require_own(caller)) is None:
            return
        if not self._is_begun:
            raise Conflict(f"{update} is under way")
        update.fail("weight_dir takes neither start_weight_update nor finish_weight_update")
        raise Conflict(f"{update.error}: call update_weights again, without them")

    def require_not_loading(self) -> None:
        """Raises ``Conflict`` if an update is under way on the bus."""
        if self._session.is_loading:
            raise Conflict(f"{self._update} is under way")

    def _on_undone(self, reason: str) -> None:
        if self._update is not None:
            self._update.fail(reason)
