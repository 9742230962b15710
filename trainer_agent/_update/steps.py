"""Sends requests that every engine must answer, and keeps track of the trainer's pause.

A task sends its request before it first waits. So tasks that are started one after the other send
their requests in that order, as in :func:`ask_in_order`.
"""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
import anyio.to_thread

import bus.log
from bus._ids import new_update_id
from bus._protocol.trainer.pause_window import PauseWindow
from bus.messages import (
    Abort,
    GroupAck,
    Message,
    PauseLocal,
    Probe,
    ProbeReport,
    Resume,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from anyio.abc import TaskGroup

    from bus.errors import WavebusError
    from bus.messages import ChunkSent, WeightChunkMeta
    from trainer_agent._connection import Connection
    from trainer_agent._options import PauseOptions

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Steps:
    """Sends the requests of one trainer, and waits until all engines have answered.

    Args:
        lease_ms: how long engines stay paused if trainer and broker are both gone.
        timeout_s: how long one step may take.

    Attributes:
        version: the greatest version that the bus has reported.
        window: the state of the trainer's pause.
        kept_dtypes: patterns of the names of tensors that engines keep in float32, as they said.
    """

    def __init__(self, connection: Connection, *, lease_ms: int, timeout_s: float) -> None:
        self.version = 0
        self.window = PauseWindow()
        self.kept_dtypes: set[str] = set()
        self.connection = connection
        self._lease_ms = lease_ms
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._log = bus.log.logger()

    def fork(self) -> Steps:
        """Returns new steps for the same connection, which track a pause of their own.

        Catch-ups use them. Both take update ids from one counter.
        """
        forked = Steps(self.connection, lease_ms=self._lease_ms, timeout_s=self._timeout_s)
        forked._ids = self._ids
        return forked

    @property
    def holds_pause(self) -> bool:
        """Whether this trainer holds its group in a pause."""
        return self.window.is_open and self.window.epoch == self.connection.epoch

    def new_id(self) -> str:
        """Returns a new id for an update or a pause."""
        return new_update_id(self.connection.boot, next(self._ids))

    def pause_message(
        self, update_id: str, options: PauseOptions, scope: tuple[str, ...] = ()
    ) -> PauseLocal:
        """Returns the PAUSE_LOCAL that pauses the group.

        Args:
            update_id: the id of the pause, or of the update that needs it.
            scope: the DP groups to pause; empty: all.
        """
        return PauseLocal(
            update_id,
            options.mode,
            options.clear_cache,
            max(self._lease_ms, self.connection.least_lease_ms),
            int(self._timeout_s * 1000),
            int(options.wait_s * 1000),
            options.escalate,
            scope,
        )

    async def pause(self, update_id: str, options: PauseOptions) -> GroupAck:
        """Pauses the group until RESUME; if this fails or is cancelled, the group resumes.

        Raises:
            PauseFailed: not every engine could be paused; paused engines have resumed.
        """
        async with self.resume_on_failure(update_id):
            return await self.step(self.pause_message(update_id, options))

    @asynccontextmanager
    async def resume_on_failure(self, update_id: str) -> AsyncIterator[None]:
        """Ends the pause ``update_id`` if a step in the block fails or is cancelled."""
        try:
            yield
        except BaseException as error:
            await self.undo(*self.window.undo(update_id, error))
            raise

    async def undo(self, *messages: Abort | Resume) -> WavebusError | None:
        """Sends the messages that abort an update or end a pause.

        Unlike :meth:`step`, this does not check that the trainer still holds the pause. If the
        broker is silent, it receives the messages when it is back.

        Returns:
            The first error; None if all messages were answered.
        """
        for message in messages:
            self.window.on_over(message)
        return await self.connection.delivery.send(*messages) if messages else None

    async def step(self, message: Message) -> GroupAck:
        """Sends one request and returns the group's answer.

        After a RESUME, the answer and the log name the engines that could not resume. The broker
        retries these engines while the others serve.

        Raises:
            Refused: an engine or the broker answered with a NACK; or the request needs this
                trainer's pause, which the broker has ended.
            BusTimeout: a peer did not answer in time.
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

    async def send_chunk(self, message: WeightChunkMeta | ChunkSent) -> GroupAck:
        """Sends one of a chunk's two messages, and waits until all engines have answered.

        Raises:
            Refused: as :meth:`step`.
            BusTimeout: as :meth:`step`.
        """
        await self.connection.wait_until_delivered(message, self._timeout_s)
        self.window.require_epoch(self.connection.epoch, message.update_id)
        return await self.connection.ask(message, GroupAck)

    @asynccontextmanager
    async def announce_chunk(self, meta: WeightChunkMeta) -> AsyncIterator[None]:
        """Announces a chunk, and after the block waits until engines have applied it.

        The block must send the chunk, and CHUNK_SENT.
        """
        async with flat_task_group() as tasks:
            tasks.start_soon(self.send_chunk, meta)
            await anyio.lowlevel.checkpoint()  # the request has left
            yield

    async def probe(self, probe: Probe) -> ProbeReport:
        """Runs the canary's probes on all engines, and returns their results.

        Raises:
            Refused: as :meth:`step`.
            BusTimeout: as :meth:`step`.
        """
        self.window.require_epoch(self.connection.epoch, probe.update_id)
        return await self.connection.ask(probe, ProbeReport)


@asynccontextmanager
async def flat_task_group() -> AsyncIterator[TaskGroup]:
    """Opens a task group that raises its first error, not an exception group."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise first_error(group) from group


async def run_to_end(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Runs ``call`` in a thread, and returns its result; cancelled callers wait too."""
    results: list[T] = []

    async def run() -> None:
        results.append(await anyio.to_thread.run_sync(call, *args))

    async with flat_task_group() as tasks:  # shields the task in it, also if asyncio cancels
        tasks.start_soon(run)
    return results[0]


async def ask_in_order(*asks: Callable[[], Coroutine[object, object, object]]) -> None:
    """Sends requests in this order, and waits until all are answered."""
    async with flat_task_group() as tasks:
        for ask in asks:
            tasks.start_soon(ask)


def first_error(error: BaseException) -> BaseException:
    """Returns the first error of an exception group; any other error unchanged.

    One error is enough, because all chunks in flight fail for the same reason.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
