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
from bus.errors import Refused, UpdateFailed
from bus.ids import new_update_id
from bus.messages import (
    Abort,
    GroupAck,
    Message,
    NackCode,
    PauseLocal,
    Probe,
    ProbeReport,
    Resume,
    Sleep,
    SleepLevel,
    Wake,
)
from trainer_agent.failures import own_nack

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
        is_asleep: the group's weights sleep, in a pause of ours.
        pause_options: how that pause was made, or the last one was.
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
        self.is_asleep = False
        self.pause_options: PauseOptions | None = None
        self.connection = connection
        self._lease_ms = lease_ms
        self._timeout_s = timeout_s
        self.ids: Iterator[int] = itertools.count(1) if ids is None else ids
        self._log = bus.log.logger()
        self._held_pause: tuple[str, int] | None = None  # the pause we hold: its id and epoch

    @property
    def holds_pause(self) -> bool:
        """Whether the group is paused by us."""
        return self._held_pause is not None

    def new_id(self) -> str:
        """For an update, or a pause."""
        return new_update_id(self.connection.boot, next(self.ids))

    async def pause(self, update_id: str, options: PauseOptions) -> GroupAck:
        """Pause the group, and hold it. Given up, it is completed, and then resumed.

        Raises:
            PauseFailed: not every engine could be paused; those that were, have resumed.
        """
        async with self.resume_on_failure(update_id):
            return await self.request_pause(update_id, options)

    @contextlib.asynccontextmanager
    async def resume_on_failure(self, update_id: str) -> AsyncIterator[None]:
        """For a step of this pause: when it has no answer, or nobody waits for one any more, the
        pause is ended."""
        try:
            yield
        except Refused:
            raise
        except BaseException:
            await self.undo(Resume(update_id))
            raise

    async def request_pause(
        self, update_id: str, options: PauseOptions, scope: tuple[str, ...] = ()
    ) -> GroupAck:
        """The same; who gives it up, sees to the resume. ``scope``: of these DP groups alone.

        Raises:
            PauseFailed: as :meth:`pause`.
        """
        ask = PauseLocal(
            update_id,
            options.mode,
            options.clear_cache,
            self._lease_ms,
            int(self._timeout_s * 1000),
            int(options.wait_s * 1000),
            options.escalate,
            scope,
        )
        ack = await self.step(ask)
        self.pause_options = options
        self._held_pause = (update_id, self.connection.epoch)
        return ack

    async def sleep(self, level: SleepLevel) -> GroupAck:
        """Have the engines, paused by us, give their memory back."""
        assert self._held_pause is not None
        self.is_asleep = True
        return await self.step(Sleep(self._held_pause[0], level))

    async def wake(self) -> GroupAck:
        """Have them take their weights' memory again."""
        assert self._held_pause is not None
        done = await self.step(Wake(self._held_pause[0]))
        self.is_asleep = False
        return done

    async def resume(self, update_id: str) -> GroupAck:
        """Let the group go; who sleeps, wakes. Engines that can't are named in the answer, and
        in the log: the broker asks them again, while the others serve."""
        self.is_asleep = False
        try:
            ack = await self.step(Resume(update_id))
        finally:
            self._held_pause = None
        if ack.excluded:
            self._log.warning("engines_not_resumed", engines=list(ack.excluded))
        return ack

    async def resume_if_paused(self, update_id: str) -> GroupAck | None:
        """The same; None if the broker knows of no such pause. One that was restarted does not, and
        resumes engines that are in it by itself."""
        try:
            return await self.resume(update_id)
        except Refused as refused:
            if refused.code is not NackCode.WRONG_STATE:
                raise
            return None

    async def undo(self, *messages: Abort | Resume) -> WavebusError | None:
        """Give an update up, end a pause, whoever holds it by now: what nobody goes on with would
        stand in the way of the next. A broker that is silent is told later.

        Returns:
            What could not be had.
        """
        if any(isinstance(message, Resume) for message in messages):
            self.is_asleep = False
            self._held_pause = None
        return await self.connection.delivery.send(*messages) if messages else None

    async def step(self, message: Message) -> GroupAck:
        """One step; in a pause, only as the trainer that made it.

        Raises:
            Refused: an engine or the broker answered with a NACK.
            BusTimeout: somebody did not answer in time.
        """
        await self.connection.wait_until_delivered(message, self._timeout_s)
        self._check_held_pause(message)
        done = await self.connection.ask(message, GroupAck)
        self.version = max(self.version, done.version)
        return done

    async def probe(self, probe: Probe) -> ProbeReport:
        """Run the canary's probes on all engines, and hear what they gave.

        Raises:
            Refused, BusTimeout: as :meth:`step`.
        """
        self._check_held_pause(probe)
        return await self.connection.ask(probe, ProbeReport)

    def _check_held_pause(self, message: Message) -> None:
        if self._held_pause is not None and self.connection.epoch != self._held_pause[1]:
            self._held_pause = None
            raise UpdateFailed(
                own_nack(
                    NackCode.FENCED,
                    "the bus took this trainer for dead, and has resumed its engines",
                    update_id=getattr(message, "update_id", ""),
                    field="epoch",
                    hint="keep the event loop free, or use SyncTrainerAgent",
                )
            )


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
