"""Makes the gateway the trainer of its group, on behalf of HTTP clients, one call at a time.

Clients of vLLM's routes send no heartbeat. So a pause or an update ends if no call comes for
``silence_s``, or for ``lease_s`` after a client has disconnected during a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import bus.log
from bus.errors import WavebusError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trainer_agent._gateway.agent import GatewayAgent

_TICK_S: Final = 1.0
_SILENT: Final = "the client made no call for too long"


class ClientSession:
    """The gateway's membership of the bus, as a trainer. The first call joins.

    Args:
        silence_s: after how many seconds without a call a pause or an update ends.
        lease_s: the same after a client has disconnected during a call.

    Attributes:
        agent: the agent; None before the first call.
        on_undone: called with the reason when an update is undone.
        is_begun: returns whether a client has started an update that the bus does not have yet.
    """

    def __init__(
        self, make_agent: Callable[[], Awaitable[GatewayAgent]], *, silence_s: float, lease_s: float
    ) -> None:
        self.agent: GatewayAgent | None = None
        self.on_undone: Callable[[str], object] = lambda _: None
        self.is_begun: Callable[[], bool] = lambda: False
        self._make_agent = make_agent
        self._silence_s = silence_s
        self._lease_s = min(lease_s, silence_s)
        self._lock = asyncio.Lock()
        self._deadline_s = float("inf")
        self._watch: asyncio.Task[None] | None = None
        self._log = bus.log.logger()

    @property
    def is_busy(self) -> bool:
        """Whether a call is being carried out."""
        return self._lock.locked()

    @property
    def is_loading(self) -> bool:
        """Whether an update is under way on the bus."""
        return self.agent is not None and self.agent.has_update

    async def close(self) -> None:
        """Leaves the bus, which undoes an update under way and ends a pause."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        agent, self.agent = self.agent, None
        if agent is not None:
            await agent.close()

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[GatewayAgent]:
        """Yields the agent to one `async with` block at a time. The first block joins the bus.

        Raises:
            BusTimeout: no broker answers.
            Refused: another trainer owns the group.
        """
        async with self._lock:
            if self.agent is None:
                self.agent = await (await self._make_agent()).connect()
                self._watch = asyncio.create_task(self._watch_silence())
            self._deadline_s = float("inf")
            left_s = self._silence_s
            try:
                yield self.agent
            except asyncio.CancelledError:  # the client has disconnected
                left_s = self._lease_s
                raise
            finally:
                self._deadline_s = time.monotonic() + left_s

    async def release(self, agent: GatewayAgent, reason: str) -> None:
        """Undoes the update under way, and ends the pause. Call within :meth:`call`."""
        if self.is_loading:
            self.on_undone(reason)
            await agent.undo_native()
        await agent.resume()

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if time.monotonic() < self._deadline_s or self.agent is None:
                continue
            if not (self.is_loading or self.agent.is_paused or self.is_begun()):
                continue
            self._log.warning("client_silent", group=self.agent.group)
            try:
                async with self.call() as agent:
                    if self.is_begun():
                        self.on_undone(_SILENT)
                    await self.release(agent, _SILENT)
            except WavebusError as error:  # the broker ends the pause by its lease
                self._log.warning("release_failed", error=str(error))
