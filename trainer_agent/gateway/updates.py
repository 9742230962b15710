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
    LOADING    finish                     DONE       UPDATE_FINISH, COMMIT
    LOADING    a call fails, or its       FAILED     ABORT; engines serve what they had
               client disconnects
    LOADING    resume, silence            FAILED     the same
    any        update_weights, refused    (as above) the client's broadcast is ended, see below
    FAILED     finish, update_weights     FAILED     refused, with the update's error
    FAILED     start                      STARTED
    DONE       finish                     DONE       the same answer
    DONE       start                      STARTED

Invariants:

- No update is committed of which a call has failed.
- A start is refused while an update of another client is under way, or a call is at work.
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
  after that comes in FAILED, and ends the broadcast,
- for a repeated call whose broadcast was ended before.

If a broadcast can't be ended, the transport is closed. The answer says so, and so do the answers of
later calls in FAILED, until another transport is open.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from bus.errors import ManifestRefused, UsageError, WavebusError
from bus.manifest import TensorMeta
from trainer_agent.gateway.pickled_handles import read_info

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bus.messages import Target
    from trainer_agent.gateway.agent import GatewayAgent
    from trainer_agent.gateway.client_session import ClientSession

_LEFT: Final = (
    "the client's broadcast was not ended, and its transport is closed; call "
    "init_weight_transfer_engine again"
)


class Conflict(WavebusError):
    """A call doesn't fit what is under way, or what has failed."""


class Missing(UsageError):
    """A call names what is not there."""


class HttpStage(Enum):
    """How far a client's update is."""

    STARTED = "started"
    LOADING = "loading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a call.

    Attributes:
        address: its address, for texts.
        is_gone: whether its connection has ended.
        connection: identifies the connection.
    """

    address: str
    is_gone: Callable[[], bool]
    connection: object


@dataclass(slots=True)
class HttpUpdate:
    """An update of an HTTP client, from its start to its finish."""

    target: Target
    caller: Caller
    since_s: float
    stage: HttpStage = HttpStage.STARTED
    error: str = ""
    left: str = ""  # why its client's transport was closed, if it was
    known: list[list[TensorMeta]] = field(default_factory=list)  # of the calls of the last update
    planned: list[list[TensorMeta]] = field(default_factory=list)  # armed at once; empty: open
    calls: list[list[TensorMeta]] = field(default_factory=list)  # that were received
    infos: list[object] = field(default_factory=list)  # their update_info
    drained: object = None  # the update_info of the last refused call whose broadcast was ended

    @property
    def next_known(self) -> list[TensorMeta]:
        """What the next call brings, if it is as in the last update; empty: that had no more."""
        after = self.known[len(self.calls) :]
        return after[0] if after else []

    def repeats(self, info: object) -> bool:
        """Returns whether a call was received before."""
        names = info.get("names") if isinstance(info, dict) else None
        return info in self.infos and (bool(names) or not self.next_known)

    async def arm(
        self, agent: GatewayAgent, metas: list[TensorMeta], *, was_committed: bool
    ) -> None:
        """Has all engines check the tensors of the next call, unless they have.

        Args:
            agent: asks them.
            metas: the tensors.
            was_committed: whether the last update was, whose calls are known.

        Raises:
            ManifestRefused: a model doesn't take them; the update is aborted.
            Conflict: all engines have checked others; the update is aborted.
        """
        if not self.calls:
            is_same = was_committed and metas == self.next_known
            if is_same and not (agent.is_paused and len(self.known) > 1):
                self.planned = self.known
            await self._start(agent, metas)
        elif not self.planned:
            await agent.extend_native(metas)
        elif [metas] != self.planned[len(self.calls) :][:1]:
            await agent.undo_native()
            raise Conflict(
                f"call {len(self.calls) + 1} brings other tensors than in the last update, or "
                "some beside all that the model takes; begin again"
            )

    async def _start(self, agent: GatewayAgent, metas: list[TensorMeta]) -> None:
        """Has all engines check the first call's tensors, and perhaps those of the calls to come.

        If the first call lacks tensors, others may follow it.
        """
        planned = self.planned or [metas]
        is_part = not self.planned and len(self.known) > 1 and metas == self.known[0]
        try:
            await agent.start_native(planned, self.target, is_open=is_part)
        except ManifestRefused as error:
            if is_part or self.planned or error.nack.tensor in {each.name for each in metas}:
                raise
            await agent.start_native(planned, self.target, is_open=True)
        else:
            self.planned = [] if is_part else planned

    def fail(self, error: str) -> None:
        """Ends the update; its finish is answered with the error."""
        self.stage, self.error = HttpStage.FAILED, error

    def __str__(self) -> str:
        age_s = time.monotonic() - self.since_s
        return f"an update of {self.caller.address}, begun {age_s:.0f} s ago"


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
        session.on_undone, session.is_begun = self._on_undone, lambda: self._is_begun

    # -- the transport --------------------------------------------------------------

    async def open(self, info: Mapping[str, Any]) -> None:
        """Makes every engine join the client's communicator.

        Args:
            info: vLLM's ``init_info``.

        Raises:
            Conflict: an update is under way.
            UsageError: the sizes don't fit the group, or its engines were not started for this.
        """
        self.require_none()
        async with self._session.call() as agent:
            self._manifests.clear()
            self._committed.clear()
            await agent.open_native(info)
            if self._update is not None:
                self._update.left = ""

    async def close_transport(self) -> None:
        """Closes the client's communicator; undoes an update that was not finished."""
        async with self._session.call() as agent:
            self._manifests.clear()
            self._committed.clear()
            if self._open_update() is not None:
                self._on_undone("its transport was shut down")
            await agent.close_native()

    # -- updates ----------------------------------------------------------------------

    async def start(self, target: Target, caller: Caller) -> None:
        """Begins an update. A client that repeats it, or has begun one before and is gone, may.

        Raises:
            Conflict: another client's update is under way.
        """
        update = self._open_update()
        if update is not None:
            same = update.caller.connection is caller.connection or update.caller.is_gone()
            if not same or self._session.is_busy:
                raise Conflict(f"{update} is under way")
        async with self._session.call():
            if self._update is not update:
                self.require_none()
            elif self._is_begun and update is not None and update.target == target:
                return
            self._has_finished = False
            known = self._manifests.get(target, [])
            self._update = HttpUpdate(target, caller, time.monotonic(), known=known)

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
            except WavebusError as error:
                if agent.has_broadcasts and not repeats:
                    await self._end_broadcast(agent, info, error)
                self._answered += 1
                raise
            self._answered += 1

    async def _receive(self, agent: GatewayAgent, info: object, began: HttpUpdate | None) -> None:
        update = self._require_update()
        if update is not began or update.repeats(info):
            raise Conflict(f"{update} has these tensors already")
        update.stage, given = HttpStage.LOADING, info
        try:
            if isinstance(info, dict):
                info = await asyncio.to_thread(read_info, info, allowed=self._takes_pickles)
            described, metas = _read(info, update.next_known)
            was_committed = update.target in self._committed
            self._committed.discard(update.target)
            await update.arm(agent, metas, was_committed=was_committed)
            await agent.receive_native(described)
        except BaseException as error:
            update.fail(str(error) or "its client disconnected")
            raise
        update.calls.append(metas)
        update.infos.append(given)
        self._manifests[update.target] = update.calls

    async def _end_broadcast(self, agent: GatewayAgent, info: object, error: Exception) -> None:
        """Ends the broadcast of a refused call; the error's notes say if that is impossible."""
        update = self._update
        if update is not None and (update.stage is HttpStage.LOADING or info == update.drained):
            return
        try:
            described, metas = _read(info, [] if update is None else update.next_known)
        except UsageError:
            await agent.close_native()
            self._note_left(error, "what its client sends is unknown")
            return
        columns = {
            "names": [""] * len(metas),  # how much comes does not depend on them
            "dtype_names": [each.dtype for each in metas],
            "shapes": [list(each.shape) for each in metas],
        }
        drain = asyncio.create_task(agent.drain_native({**described, **columns}))
        try:
            await asyncio.wait([drain])
        finally:
            await asyncio.wait([drain])  # it ends soon, also if the client has disconnected
            if failure := drain.exception():
                self._note_left(error, str(failure))
            elif update is not None:
                update.drained = info

    def _note_left(self, error: Exception, why: str) -> None:
        left = f"{why}: {_LEFT}"
        error.add_note(left)
        if self._update is not None:
            self._update.left = left

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
            failed = Conflict(f"the update failed, and engines serve what they had: {update.error}")
            if update.left:
                failed.add_note(update.left)
            raise failed
        return update

    def _open_update(self) -> HttpUpdate | None:
        """Returns the update that was begun, and has neither ended nor failed."""
        update = self._update
        return None if update is None or update.stage is HttpStage.FAILED else update

    def require_none(self) -> None:
        """Checks that no update is under way.

        Raises:
            Conflict: one is.
        """
        update = self._open_update()
        if update is not None:
            raise Conflict(f"{update} is under way")

    def require_no_start(self) -> None:
        """Checks that no update is under way, for a call that is a whole update by itself.

        Raises:
            Conflict: one is. If it has only begun, it fails, so that nobody takes it for this call.
        """
        if self._update is not None and self._is_begun:
            self._update.fail("a folder needs no start_weight_update, and no finish_weight_update")
            raise Conflict(f"{self._update.error}: send it again, without them")
        self.require_none()

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


def _read(info: object, known: list[TensorMeta]) -> tuple[Mapping[str, Any], list[TensorMeta]]:
    """Returns a client's ``update_info``, and the tensors that it describes.

    Args:
        info: the ``update_info``.
        known: its tensors, if it names none.

    Raises:
        UsageError: it can't be read, or describes none.
    """
    if not isinstance(info, dict):
        raise UsageError("update_info: an object is needed")
    try:
        names, dtypes, shapes = info["names"], info["dtype_names"], info["shapes"]
        metas = [
            TensorMeta(name, dtype, tuple(shape))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"update_info: {error!r}: names, dtype_names and shapes") from error
    # From 0.33 on vLLM's trainer engine says once what it sends over a communicator.
    if not metas and not known:
        raise UsageError("update_info: no tensors are named, and none were named before")
    return info, metas or known
