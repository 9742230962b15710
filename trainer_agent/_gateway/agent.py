"""The gateway's trainer agent: carries out the updates and pauses of HTTP clients."""

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
    """A trainer agent whose pauses and updates begin and end in separate calls.

    ``native`` calls serve clients that send the tensors themselves, over vLLM's own backends.
    """

    _hold: AsyncExitStack | None = None
    _pause_id = ""

    @property
    def is_paused(self) -> bool:
        """Whether this agent's pause holds. The bus ends the pause of a lost agent."""
        return self._hold is not None and self._steps.holds_pause

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pauses the group until :meth:`resume`; arguments and errors as :meth:`paused`.

        Raises:
            UsageError: the group is paused already.
        """
        await self.resume()  # closes a pause that the bus has ended
        async with AsyncExitStack() as stack:
            ack = await stack.enter_async_context(self.paused(mode=mode, clear_cache=clear_cache))
            self._pause_id = ack.update_id
            self._hold = stack.pop_all()

    async def resume(self) -> None:
        """Ends the pause, if there is one, and wakes engines that sleep."""
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
        """Frees memory of the paused engines; arguments and errors as :meth:`asleep`."""
        await self._steps.step(Sleep(self._pause_id, level))

    async def wake_weights(self) -> None:
        """Allocates the weights' memory again; KV caches follow at the end of the pause."""
        await self._steps.step(Wake(self._pause_id))

    async def group_status(self) -> GroupStatus | None:
        """Returns the broker's view of the group; None before the group has a member."""
        status = await self.status()
        return next((each for each in status.groups if each.name == self.group), None)

    async def open_native(self, info: Mapping[str, Any]) -> None:
        """Makes every engine join the communicator of a client.

        Args:
            info: vLLM's ``init_info``, with the rank of the first worker.

        Raises:
            UsageError: the communicator's size doesn't fit the group, or its engines were started
                without this backend.
            UpdateFailed: an engine could not join.
        """
        await self._engine_session.init(dict(info), None)

    async def close_native(self) -> None:
        """Aborts an unfinished update, and closes the client's transport."""
        await self._engine_session.shutdown()

    async def start_native(
        self, parts: Sequence[Sequence[TensorMeta]], target: Target, *, is_open: bool
    ) -> None:
        """Starts an update: every engine checks the tensors, and is ready to receive them.

        The update is staged if possible, and never while the group is paused.

        Args:
            parts: the tensors of each call of :meth:`receive_native`, in the order of sending.
            is_open: whether :meth:`extend_native` may add tensors.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors. No engine has entered a
                collective.
            Refused: an engine or the broker refused the update.
        """
        plan = UpdatePlan.of_parts(parts, is_open=is_open)
        options = UpdateOptions(PauseOptions(), how="auto")
        await self._engine_session.start(plan, options, target, reads_source=False)

    async def extend_native(self, metas: Sequence[TensorMeta]) -> None:
        """Has every engine check the tensors of the next call of :meth:`receive_native`.

        Args:
            metas: the tensors, in the order of sending.

        Raises:
            ManifestRefused: an engine's model doesn't take these tensors. No engine has entered a
                collective for them, and the update is aborted.
        """
        await self._engine_session.extend(metas)

    async def receive_native(self, info: Mapping[str, Any]) -> None:
        """Has every engine receive and load the tensors of ``info``, vLLM's ``update_info``."""
        await self._engine_session.update(dict(info))

    @property
    def has_broadcasts(self) -> bool:
        """Whether the open transport is a client's, and sends by broadcasts."""
        return self._transport.is_foreign and bool(self._transport.communicator)

    async def drain_native(self, info: Mapping[str, Any]) -> None:
        """Ends a client's broadcast: every engine enters the broadcast and discards the tensors.

        No engine may have entered this broadcast before. A failure closes the transport.

        Args:
            info: vLLM's ``update_info``.

        Raises:
            WavebusError: an engine could not drain, or the client did not send all in time.
        """
        try:
            handle = encode_info(info)
        except ValueError as error:
            self._transport.invalidate()
            raise UsageError(f"update_info: {error}") from error
        await self._transport.drain(handle)

    async def commit_native(self, label: str) -> int:
        """Commits the update, which the client calls ``label``, and returns its version."""
        await self._engine_session.finish(label)
        return self._steps.version

    @property
    def has_update(self) -> bool:
        """Whether an update is under way on the bus."""
        return self._updates.is_busy

    async def undo_native(self) -> None:
        """Aborts the update under way, if any; engines serve their old weights."""
        await self._engine_session.undo()
