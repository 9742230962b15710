"""The gateway's trainer agent, whose caller is at the other end of an HTTP connection."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from bus._vllm.payloads import encode_info
from bus.errors import UsageError, WavebusError
from bus.messages import Sleep, Wake
from trainer_agent._agent import TrainerAgent
from trainer_agent._options import PauseOptions, UpdateOptions
from trainer_agent._update.plan import UpdatePlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bus._manifest import TensorMeta
    from bus.messages import GroupStatus, PauseMode, SleepLevel, Target


class GatewayAgent(TrainerAgent):
    """Adds to the trainer agent what vLLM's routes need: calls without a block around them."""

    _hold: AsyncExitStack | None = None
    _pause_id = ""

    @property
    def is_paused(self) -> bool:
        """Whether this agent holds its group in a pause. The bus ends it if it misses the agent."""
        return self._hold is not None and self._steps.holds_pause

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pauses the group until :meth:`resume`.

        Args:
            mode: as :meth:`TrainerAgent.paused`.
            clear_cache: as :meth:`TrainerAgent.paused`.

        Raises:
            PauseFailed: as :meth:`TrainerAgent.paused`.
            UsageError: the group is paused already.
        """
        await self.resume()  # of one that the bus has ended
        async with AsyncExitStack() as stack:
            ack = await stack.enter_async_context(self.paused(mode=mode, clear_cache=clear_cache))
            self._pause_id = ack.update_id
            self._hold = stack.pop_all()

    async def resume(self) -> None:
        """Ends the pause, if there is one. Engines that sleep wake up."""
        was_paused = self.is_paused
        hold, self._hold = self._hold, None
        if hold is None:
            return
        try:
            await hold.aclose()
        except WavebusError:
            if was_paused:
                raise

    async def sleep(self, level: SleepLevel) -> None:
        """Frees memory of the engines, in the pause.

        Args:
            level: as :meth:`TrainerAgent.asleep`.

        Raises:
            Refused: as :meth:`TrainerAgent.asleep`.
        """
        await self._steps.step(Sleep(self._pause_id, level))

    async def wake_weights(self) -> None:
        """Allocates the weights' memory again; KV caches wait for the end of the pause."""
        await self._steps.step(Wake(self._pause_id))

    async def group_status(self) -> GroupStatus | None:
        """Returns the broker's view of the group; None before it has a member."""
        status = await self.status()
        return next((each for each in status.groups if each.name == self.group), None)

    async def open_native(self, info: Mapping[str, Any]) -> None:
        """Makes every engine join the communicator of a client that sends over vLLM's own backend.

        Args:
            info: vLLM's ``init_info``, with the rank of the first worker.

        Raises:
            UsageError: the sizes don't fit the group, or its engines were not started for this.
            UpdateFailed: an engine could not join.
        """
        await self._engine_session.init(dict(info), None)

    async def close_native(self) -> None:
        """Aborts an update that was not finished, and stops using the client's transport."""
        await self._engine_session.shutdown()

    async def start_native(
        self, parts: Sequence[Sequence[TensorMeta]], target: Target, *, is_open: bool
    ) -> None:
        """Checks the tensors on every engine, arms them, and has them wait for the tensors.

        The update is staged if possible, and not if the group is paused.

        Args:
            parts: the tensors of each call of :meth:`receive_native`, in the order of sending.
            is_open: whether more may follow, by :meth:`extend_native`.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors. No engine has entered a
                collective.
            Refused: an engine or the broker refused.
        """
        plan = UpdatePlan.of_parts(parts, is_open=is_open)
        options = UpdateOptions(PauseOptions(), how="auto")
        await self._engine_session.start(plan, options, target, reads_source=False)

    async def extend_native(self, metas: Sequence[TensorMeta]) -> None:
        """Checks further tensors on every engine, which the next receive brings.

        Args:
            metas: the tensors, in the order of sending.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors. No engine has entered a
                collective for them; the update is aborted.
        """
        await self._engine_session.extend(metas)

    async def receive_native(self, info: Mapping[str, Any]) -> None:
        """Has every engine receive and load the next tensors; returns when all have.

        Args:
            info: vLLM's ``update_info``.
        """
        await self._engine_session.update(dict(info))

    @property
    def has_broadcasts(self) -> bool:
        """Whether a client's transport is open over which it sends by broadcasts."""
        return self._transport.is_foreign and bool(self._transport.communicator)

    async def drain_native(self, info: Mapping[str, Any]) -> None:
        """Has every engine enter the client's broadcast and discard what comes, so that it ends.

        No engine may have entered it before. If this fails, the transport is closed.

        Args:
            info: vLLM's ``update_info``.

        Raises:
            WavebusError: an engine can't or did not, or the client was not there in time.
        """
        try:
            handle = encode_info(info)
        except ValueError as error:
            self._transport.invalidate()
            raise UsageError(f"update_info: {error}") from error
        await self._transport.drain(handle)

    async def commit_native(self, label: str) -> int:
        """Makes every engine serve the new weights, and returns their version.

        Args:
            label: the client's own name of the weights.
        """
        await self._engine_session.finish(label)
        return self._steps.version

    @property
    def has_update(self) -> bool:
        """Whether an update has begun on the bus, and has neither ended nor failed."""
        return self._updates.is_busy

    async def undo_native(self) -> None:
        """Aborts the update that was begun, if any; the engines serve what they had."""
        await self._engine_session.undo()
