"""Steps of all engines, asked for one by one, and the pause that is held meanwhile."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

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
from trainer_agent.refusals import own_nack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from bus.errors import WavebusError
    from trainer_agent.connection import Connection
    from trainer_agent.how import PauseHow


class Steps:
    """Of one trainer. Each method waits for all engines. ``ids``: of others beside these, so that
    no two have the same.

    Attributes:
        version: the greatest that the bus has told of.
        asleep: the group's weights sleep, in a pause of ours.
        held_how: how that pause was made, or the last one was.
    """

    def __init__(
        self, line: Connection, *, lease_ms: int, timeout_s: float, ids: Iterator[int] | None = None
    ) -> None:
        self.version = 0
        self.asleep = False
        self.held_how: PauseHow | None = None
        self._line = line
        self._lease_ms = lease_ms
        self._timeout_s = timeout_s
        self.ids: Iterator[int] = itertools.count(1) if ids is None else ids
        self._log = bus.log.logger()
        self._window: tuple[str, int] | None = None  # the pause we hold: its id and epoch

    @property
    def held(self) -> bool:
        """Whether the group is paused by us."""
        return self._window is not None

    def new_id(self) -> str:
        """For an update, or a pause."""
        return new_update_id(self._line.boot, next(self.ids))

    async def pause(self, update_id: str, how: PauseHow) -> GroupAck:
        """Pause the group, and hold it. Given up, it is completed, and then resumed.

        Raises:
            PauseFailed: not every engine could be paused; those that were, have resumed.
        """
        async with self.resumed_if_given_up(update_id):
            return await self.ask_pause(update_id, how)

    @contextlib.asynccontextmanager
    async def resumed_if_given_up(self, update_id: str) -> AsyncIterator[None]:
        """For a step of this pause: when it has no answer, or nobody waits for one any more, the
        pause is ended."""
        try:
            yield
        except Refused:
            raise
        except BaseException:
            await self.undo(Resume(update_id))
            raise

    async def ask_pause(
        self, update_id: str, how: PauseHow, scope: tuple[str, ...] = ()
    ) -> GroupAck:
        """The same; who gives it up, sees to the resume. ``scope``: of these DP groups alone.

        Raises:
            PauseFailed: as :meth:`pause`.
        """
        ask = PauseLocal(
            update_id,
            how.mode,
            how.clear_cache,
            self._lease_ms,
            int(self._timeout_s * 1000),
            int(how.wait_s * 1000),
            how.escalate,
            scope,
        )
        ack = await self.step(ask)
        self.held_how = how
        self._window = (update_id, self._line.epoch)
        return ack

    async def sleep(self, level: SleepLevel) -> GroupAck:
        """Have the engines, paused by us, give their memory back."""
        assert self._window is not None
        self.asleep = True
        return await self.step(Sleep(self._window[0], level))

    async def wake(self) -> GroupAck:
        """Have them take their weights' memory again."""
        assert self._window is not None
        done = await self.step(Wake(self._window[0]))
        self.asleep = False
        return done

    async def resume(self, update_id: str) -> GroupAck:
        """Let the group go; who sleeps, wakes. Engines that can't are named in the answer, and
        in the log: the broker asks them again, while the others serve."""
        self.asleep = False
        try:
            ack = await self.step(Resume(update_id))
        finally:
            self._window = None
        if ack.excluded:
            self._log.warning("engines_not_resumed", engines=list(ack.excluded))
        return ack

    async def undo(self, *words: Abort | Resume) -> WavebusError | None:
        """Give an update up, end a pause, whoever holds it by now: what nobody goes on with would
        stand in the way of the next. A broker that is silent is told later.

        Returns:
            What could not be had.
        """
        if any(isinstance(word, Resume) for word in words):
            self.asleep = False
            self._window = None
        return await self._line.owed.pay(*words) if words else None

    async def step(self, message: Message) -> GroupAck:
        """One step; in a pause, only as the trainer that made it.

        Raises:
            Refused: an engine or the broker answered with a NACK.
            BusTimeout: somebody did not answer in time.
        """
        await self._line.settled(message, self._timeout_s)
        self._check_window(message)
        done = await self._line.ask(message, GroupAck)
        self.version = max(self.version, done.version)
        return done

    async def probe(self, probe: Probe) -> ProbeReport:
        """Run the canary's probes on all engines, and hear what they gave.

        Raises:
            Refused, BusTimeout: as :meth:`step`.
        """
        self._check_window(probe)
        return await self._line.ask(probe, ProbeReport)

    def _check_window(self, message: Message) -> None:
        if self._window is not None and self._line.epoch != self._window[1]:
            self._window = None
            raise UpdateFailed(
                own_nack(
                    NackCode.FENCED,
                    "the bus took this trainer for dead, and has resumed its engines",
                    update_id=getattr(message, "update_id", ""),
                    field="epoch",
                    hint="keep the event loop free, or use SyncTrainerAgent",
                )
            )
