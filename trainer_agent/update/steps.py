"""Requests that all engines of the group answer, and the pause that is held meanwhile.

A request is sent before its answer is waited for, so tasks that are started one after the other
send theirs in that order. The helpers at the end ask for several at once.
"""

from __future__ import annotations

import contextlib
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel

import bus.log
from bus.ids import new_update_id
from bus.messages import (
    Abort,
    GroupAck,
    Message,
    PauseLocal,
    Probe,
    ProbeReport,
    Resume,
)
from bus.protocol.trainer.pause_window import PauseWindow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from anyio.abc import TaskGroup

    from bus.errors import WavebusError
    from bus.messages import WeightChunkMeta
    from trainer_agent.connection import Connection
    from trainer_agent.options import PauseOptions


class Steps:
    """Of one trainer. Each method waits for all engines. ``ids``: of others beside these, so that
    no two have the same.

    Attributes:
        version: the greatest that the bus has told of.
        window: the pause that the trainer holds.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        lease_ms: int,
        timeout_s: float,
        ids: Iterator[int] | None = None,
    ) -> None:
        self.version = 0
        self.window = PauseWindow()
        self.connection = connection
        self._lease_ms = lease_ms
        self._timeout_s = timeout_s
        self.ids: Iterator[int] = itertools.count(1) if ids is None else ids
        self._log = bus.log.logger()

    @property
    def holds_pause(self) -> bool:
        """Whether the group is paused by us."""
        return self.window.is_open

    def new_id(self) -> str:
        """For an update, or a pause."""
        return new_update_id(self.connection.boot, next(self.ids))

    def pause_message(
        self, update_id: str, options: PauseOptions, scope: tuple[str, ...] = ()
    ) -> PauseLocal:
        """What pauses the group, or these DP groups alone."""
        return PauseLocal(
            update_id,
            options.mode,
            options.clear_cache,
            self._lease_ms,
            int(self._timeout_s * 1000),
            int(options.wait_s * 1000),
            options.escalate,
            scope,
        )

    async def pause(self, update_id: str, options: PauseOptions) -> GroupAck:
        """Pause the group, and hold it. Given up, it is completed, and then resumed.

        Raises:
            PauseFailed: not every engine could be paused; those that were, have resumed.
        """
        async with self.resume_on_failure(update_id):
            return await self.step(self.pause_message(update_id, options))

    @contextlib.asynccontextmanager
    async def resume_on_failure(self, update_id: str) -> AsyncIterator[None]:
        """For a step of this pause: when it has no answer, or nobody waits for one any more, the
        pause is ended."""
        try:
            yield
        except BaseException as error:
            await self.undo(*self.window.undo(update_id, error))
            raise

    async def undo(self, *messages: Abort | Resume) -> WavebusError | None:
        """Give an update up, end a pause, whoever holds it by now: what nobody goes on with would
        stand in the way of the next. A broker that is silent is told later.

        Returns:
            What could not be had.
        """
        for message in messages:
            self.window.on_over(message)
        return await self.connection.delivery.send(*messages) if messages else None

    async def step(self, message: Message) -> GroupAck:
        """One step; in a pause, only as the trainer that made it. Engines that can't resume are
        named in the answer, and in the log: the broker asks them again, while the others serve.

        Raises:
            Refused: an engine or the broker answered with a NACK.
            BusTimeout: somebody did not answer in time.
        """
        await self.connection.wait_until_delivered(message, self._timeout_s)
        self.window.on_asked(message, self.connection.epoch)
        try:
            done = await self.connection.ask(message, GroupAck)
        finally:
            self.window.on_over(message)
        self.window.on_acked(message, self.connection.epoch)
        self.version = max(self.version, done.version)
        if isinstance(message, Resume) and done.excluded:
            self._log.warning("engines_not_resumed", engines=list(done.excluded))
        return done

    async def probe(self, probe: Probe) -> ProbeReport:
        """Run the canary's probes on all engines, and hear what they gave.

        Raises:
            Refused, BusTimeout: as :meth:`step`.
        """
        self.window.on_asked(probe, self.connection.epoch)
        return await self.connection.ask(probe, ProbeReport)


SendStep: TypeAlias = "Callable[[Message], Coroutine[object, object, GroupAck]]"


@asynccontextmanager
async def flat_task_group() -> AsyncIterator[TaskGroup]:
    """A task group that raises what went wrong first, and not a group of it."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise first_error(group) from group


async def ask_in_order(*asks: Callable[[], Coroutine[object, object, object]]) -> None:
    """Ask for all, in this order; return when all are answered."""
    async with flat_task_group() as tasks:
        for ask in asks:
            tasks.start_soon(ask)


@asynccontextmanager
async def announce_chunk(step: SendStep, meta: WeightChunkMeta) -> AsyncIterator[None]:
    """Engines are told of a chunk before the block; it is applied when that ends, in which the
    word that it is sent must follow."""
    async with flat_task_group() as tasks:
        tasks.start_soon(step, meta)
        await anyio.lowlevel.checkpoint()  # it is on its way
        yield


def first_error(error: BaseException) -> BaseException:
    """What went wrong first; chunks under way fail with it, for the same reason."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
