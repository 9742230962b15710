"""The trainer agent's methods that pause a group, or put it to sleep."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from bus.errors import UsageError
from bus.messages import Resume, Sleep, SleepLevel
from trainer_agent._options import WAIT_S, PauseOptions, check_choice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.messages import Escalation, GroupAck, PauseMode
    from trainer_agent._update.catch_up import CatchUp
    from trainer_agent._update.steps import Steps


class Pauses:
    """Adds :meth:`paused` and :meth:`asleep` to :class:`trainer_agent.TrainerAgent`.

    The agent defines the attributes that are used here.
    """

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
        """Keeps the group paused for the length of a block.

        An update that :meth:`send_weights` has begun is awaited first, because its commit would
        wait for the end of the block.

        Args:
            mode: ``keep`` freezes requests, ``wait`` lets running ones end, ``abort`` ends all with
                the tokens they have.
            clear_cache: whether to drop the prefix cache and the KV cache of kept requests, which
                they then recompute with the weights after the pause.
            wait_s: how long ``wait`` lets requests run, in seconds.
            escalate: the mode for engines whose requests still run after ``wait_s``. The answer
                names these engines (``escalated``) and their requests (``waited_for``).

        Yields:
            The group's answer to the pause.

        Raises:
            PauseFailed: not every engine could be paused; paused engines have resumed.
            UsageError: this agent already holds a pause.
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
            if also is not None:  # the first error is the one to raise
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
        """Keeps the group paused and its memory freed for the length of a block.

        For a trainer that shares its GPUs with the engines::

            async with agent.asleep(level=2):
                train()                             # the GPU is yours
                await agent.update_weights(model)   # wakes the weights; the KV cache stays asleep
                model.cpu()                         # make room
            # everything is awake, and serves the new weights

        The pause always drops KV caches, so kept requests recompute theirs. The trainer's event
        loop must stay free here, too.

        Args:
            level: 1 keeps the weights in the host's memory; without an update, engines serve the
                old ones afterwards. 2 discards them; engines sleep until an update brings new ones.
            mode: as :meth:`paused`.
            wait_s: as :meth:`paused`.
            escalate: as :meth:`paused`.

        Yields:
            The group's answer to the sleep.

        Raises:
            PauseFailed: as :meth:`paused`.
            Refused: an engine can't sleep (code ``wrong_state``, before any engine does) or failed
                to; or no engine could be woken at the end, because weights or memory are missing.
                If some could be woken, the log names the others, and the broker retries them.
        """
        check_choice("level", level, SleepLevel)
        async with self.paused(mode=mode, wait_s=wait_s, escalate=escalate) as paused:
            yield await self._steps.step(Sleep(paused.update_id, level))

    def _suspend_catch_up(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Suspends catch-ups for the length of a block, because the trainer has priority."""
        return contextlib.nullcontext() if self._catch_up is None else self._catch_up.suspend()
