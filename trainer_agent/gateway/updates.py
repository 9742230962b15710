"""Carries out a client's updates.

Clients repeat calls that may have succeeded, call finish after a failed update, and disconnect in
the middle of it::

    state      call                       next       then
    NONE       start                      STARTED    nothing is known of the tensors yet
    STARTED    start, of the same client  STARTED    the same answer
    STARTED    update_weights             LOADING    ARM with the tensors, pause, the transfer
    STARTED    finish                     NONE       nothing was sent
    LOADING    finish                     DONE       UPDATE_FINISH, COMMIT
    LOADING    the call fails, or its     FAILED     ABORT; engines serve what they had
               client disconnects
    LOADING    resume, silence            FAILED     the same
    FAILED     finish, update_weights     FAILED     refused, with the update's error
    FAILED     start                      STARTED
    DONE       finish                     DONE       the same answer
    DONE       start                      STARTED

Invariants:

- No update is committed of which a call has failed.
- A start is refused while an update of another client is under way, or a call is at work.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from bus.errors import UsageError, WavebusError
from bus.manifest import TensorMeta
from trainer_agent.gateway.pickled_handles import read_info

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bus.messages import Target
    from trainer_agent.gateway.client_session import ClientSession


class Conflict(WavebusError):
    """A call doesn't fit what is under way, or what has failed."""


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
        self._manifests: dict[Target, list[TensorMeta]] = {}  # of the open communicator
        session.on_undone = self._on_undone

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
            await agent.open_native(info)

    async def close_transport(self) -> None:
        """Closes the client's communicator."""
        async with self._session.call() as agent:
            self._manifests.clear()
            await agent.close_native()

    # -- updates ----------------------------------------------------------------------

    def start(self, target: Target, caller: Caller) -> None:
        """Begins an update. A client that repeats it, or has begun one before and is gone, may.

        Raises:
            Conflict: another client's update is under way.
        """
        update = self._update
        if update is not None and update.stage is not HttpStage.FAILED:
            same = update.caller.connection is caller.connection or update.caller.is_gone()
            if not same or self._session.is_busy:
                raise Conflict(f"{update} is under way")
            if update.stage is HttpStage.STARTED and update.target == target:
                return
        self._has_finished = False
        self._update = HttpUpdate(target, caller, time.monotonic())

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Has all engines check, receive and load the tensors of the update.

        Args:
            info: vLLM's ``update_info``.

        Raises:
            Conflict: no update was begun, or it has failed.
            ManifestRefused: an engine's model doesn't take these tensors; none has entered a
                collective.
            WavebusError: the update has failed. Engines serve what they had.
        """
        update = self._require_update()
        async with self._session.call() as agent:
            if update is not self._update or update.stage is not HttpStage.STARTED:
                raise Conflict(
                    f"{update} has its tensors already: send all in one call, or finish first"
                )
            update.stage = HttpStage.LOADING
            try:
                info = await asyncio.to_thread(read_info, info, allowed=self._takes_pickles)
                metas = self._metas(info, update.target)
                await agent.start_native(metas, update.target)
                await agent.receive_native(info)
            except BaseException as error:
                self._manifests.pop(update.target, None)
                self._fail(update, str(error) or "its client disconnected")
                raise
            self._manifests[update.target] = metas

    def _metas(self, info: Mapping[str, Any], target: Target) -> list[TensorMeta]:
        try:
            names, dtypes, shapes = info["names"], info["dtype_names"], info["shapes"]
            metas = [
                TensorMeta(name, dtype, tuple(shape))
                for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"update_info: {error!r}: names, dtype_names and shapes") from error
        # From 0.33 on vLLM's trainer engine says once what it sends over a communicator.
        if not metas and target not in self._manifests:
            raise UsageError("update_info: no tensors are named, and none were named before")
        return metas or self._manifests[target]

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
                version = await agent.commit_native(label)
            except BaseException as error:
                self._fail(update, str(error))
                raise
        self._update, self._has_finished, self.label = None, True, label or str(version)

    # -- checks -----------------------------------------------------------------------

    def _fail(self, update: HttpUpdate, error: str) -> None:
        update.stage, update.error = HttpStage.FAILED, error

    def _require_update(self) -> HttpUpdate:
        update = self._update
        if update is None:
            raise Conflict("no update is under way: start_weight_update comes first")
        if update.stage is HttpStage.FAILED:
            raise Conflict(f"the update failed, and engines serve what they had: {update.error}")
        return update

    def require_none(self) -> None:
        """Checks that no update is under way.

        Raises:
            Conflict: one is.
        """
        update = self._update
        if update is not None and update.stage is not HttpStage.FAILED:
            raise Conflict(f"{update} is under way")

    def require_not_loading(self) -> None:
        """Checks that no update has begun on the bus.

        Raises:
            Conflict: one has.
        """
        if self._session.is_loading:
            raise Conflict(f"{self._update} is under way")

    def _on_undone(self, reason: str) -> None:
        if self._update is not None:
            self._fail(self._update, reason)
