"""A trainer's pauses of its group: engines stand still, or sleep, for the length of a block."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from bus.errors import UsageError
from bus.messages import Resume, Sleep
from trainer_agent.options import WAIT_S, PauseOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.messages import Escalation, GroupAck, PauseMode, SleepLevel
    from trainer_agent.update.catch_up import CatchUp
    from trainer_agent.update.steps import Steps


class Pauses:
    """A part of :class:`trainer_agent.TrainerAgent`, which has all that is named here."""

    _steps: Steps
    _sending: asyncio.Task[int] | None
    _catch_up: CatchUp | None

    @contextlib.asynccontextmanager
    async def paused(
        self,
        *,
        mode: PauseMode = "keep",
        clear_cache: bool = True,
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
    ) -> AsyncIterator[GroupAck]:
        """Keep the group paused for the length of a block. An update that :meth:`send_weights` has
        begun is waited for first: its commit would wait for the block's end.

        Args:
            mode: ``keep`` freezes requests, ``wait`` lets running ones end, ``abort`` ends
                all with the tokens they have.
            clear_cache: kept requests recompute their KV cache with the weights they find
                after the pause, and no prefix cache is kept.
            wait_s: how long ``wait`` lets requests run.
            escalate: what the pause becomes on engines whose requests have not ended by
                then. The answer names these engines (``escalated``) and their requests
                (``waited_for``).

        Raises:
            PauseFailed: not every engine could be paused; those that were, have resumed.
        """
        if self._steps.holds_pause:
            raise UsageError("the group is paused already by this agent")
        if self._sending is not None:
            await asyncio.wait([self._sending])
        options = PauseOptions(mode, clear_cache=clear_cache, wait_s=wait_s, escalate=escalate)
        async with self._suspend_catch_up(), self._hold_pause(options) as ack:
            yield ack

    @contextlib.asynccontextmanager
    async def _hold_pause(self, options: PauseOptions) -> AsyncIterator[GroupAck]:
        update_id = self._steps.new_id()
        ack = await self._steps.pause(update_id, options)
        try:
            yield ack
        except BaseException as error:
            also = await self._steps.undo(Resume(update_id))
            if also is not None:  # what went wrong first is what is to be known
                error.add_note(f"and the engines could not be resumed: {also}")
            raise
        async with self._steps.resume_on_failure(update_id):
            await self._steps.step(Resume(update_id))

    @contextlib.asynccontextmanager
    async def asleep(
        self,
        *,
        level: SleepLevel = 1,
        mode: PauseMode = "keep",
        wait_s: float = WAIT_S,
        escalate: Escalation = "keep",
    ) -> AsyncIterator[GroupAck]:
        """Keep the group asleep for the length of a block: paused, with its memory given back, for
        a trainer that shares its GPUs.

        ::

            async with agent.asleep(level=2):
                train()                             # the GPU is yours
                await agent.update_weights(model)   # the weights wake for it; the KV cache sleeps
                model.cpu()                         # make room
            # everything is awake, and serves the new weights

        The pause is that of :meth:`paused`, and always drops KV caches: kept requests compute
        theirs anew. The trainer's event loop must stay free here, too.

        Args:
            level: 1 keeps the weights in the host's memory; without an update, the old ones are
                served afterwards. 2 discards them: until an update, engines sleep on.

        Raises:
            PauseFailed: see :meth:`paused`.
            Refused: an engine can't sleep (with code ``wrong_state``, before any does), or
                failed to; or, when the block ends, no engine could be woken, for want of
                weights or of memory. One of several is named in the log, and is asked again
                until it has room.
        """
        async with self.paused(mode=mode, wait_s=wait_s, escalate=escalate) as paused:
            yield await self._steps.step(Sleep(paused.update_id, level))

    def _suspend_catch_up(self) -> contextlib.AbstractAsyncContextManager[None]:
        """What the trainer asks for goes before engines that catch up."""
        return contextlib.nullcontext() if self._catch_up is None else self._catch_up.suspend()
