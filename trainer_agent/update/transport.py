"""The sending end of the transport, and what engines have opened of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from bus.errors import Refused
from bus.messages import NackCode, PlanTransfer, TransferInit, TransferPlan
from bus.weight_transfer.allocation import ALONE, World
from bus.weight_transfer.rendezvous import address_towards, host_of
from trainer_agent.update.steps import flat_task_group

if TYPE_CHECKING:
    from bus.weight_transfer.base import Sender
    from trainer_agent.connection import Connection
    from trainer_agent.update.steps import Steps

_OPENINGS: Final = 3


class Transport:
    """One agent's. Engines have one transport open at a time: the agent's own, or that of a
    trainer engine of vLLM's kind, which opens its sending end itself.

    Args:
        scope: the DP groups that it is for; empty: all.

    Attributes:
        sender: the agent's own sending end.
        own_backend: the agent's own, which stays.
        backend: of the transport that is open.
        communicator: its number.
        is_foreign: it is a trainer engine's.
    """

    def __init__(
        self,
        backend: str,
        sender: Sender,
        connection: Connection,
        steps: Steps,
        scope: tuple[str, ...] = (),
    ) -> None:
        self.sender = sender
        self.backend = backend
        self.communicator = 0
        self.is_foreign = False
        self.own_backend = backend
        self._connection = connection
        self._steps = steps
        self._buffer_bytes = 0
        self._scope = scope

    async def open(self, buffer_bytes: int) -> None:
        """Open our own, if it isn't, or has too little room for a chunk."""
        if self._buffer_bytes < buffer_bytes:
            await self.reopen(buffer_bytes)

    async def reopen(self, buffer_bytes: int) -> None:
        """Open our own, for those who are there now; again, if somebody comes or goes meanwhile."""
        self.invalidate()
        for left in reversed(range(_OPENINGS)):
            world = await self.plan() if self.sender.is_collective else ALONE
            params = await anyio.to_thread.run_sync(self.sender.open, buffer_bytes, world)
            try:
                update_id = self._steps.new_id()
                await self._meet_all(
                    TransferInit(
                        update_id, self.own_backend, params, world.number, 0, {}, self._scope
                    )
                )
                break
            except Refused as refused:
                if refused.code is not NackCode.TRANSFER_CLOSED or not left:
                    raise
        self.sender.on_opened()
        self._buffer_bytes = buffer_bytes
        self.backend = self.own_backend
        self.communicator = world.number

    async def open_foreign(self, init: TransferInit) -> None:
        """Have engines open their ends of a trainer engine's transport."""
        self.invalidate()
        self.sender.close()
        await self._steps.step(init)
        self.backend = init.backend
        self.communicator = init.communicator
        self.is_foreign = True

    async def plan(self, senders: int = 1) -> World:
        """Who would meet in a communicator that is made now, with so many ranks of the trainer."""
        plan = await self._connection.ask(PlanTransfer(self._scope), TransferPlan)
        address = address_towards(host_of(self._connection.broker))
        return World(plan.communicator, plan.world_size - 1 + senders, address, senders)

    def invalidate(self) -> None:
        """What is open can't be used any more."""
        self._buffer_bytes = 0
        self.is_foreign = False

    async def discard(self) -> None:
        """As :meth:`invalidate`, and let our own go now: whoever waits in a broadcast, here or at
        an engine, leaves it as soon as its end is one that can."""
        self.invalidate()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.sender.close)

    def close(self) -> None:
        """Let our own go."""
        self.sender.close()

    async def _meet_all(self, init: TransferInit) -> None:
        """Every engine opens its end; a sender with collectives meets them meanwhile."""
        async with flat_task_group() as tasks:
            if self.sender.is_collective:
                tasks.start_soon(self._meet)
            await self._steps.step(init)

    async def _meet(self) -> None:
        """Wait in a thread until all ends are there; closed, the sender gives up waiting."""
        try:
            await anyio.to_thread.run_sync(self.sender.meet, abandon_on_cancel=True)
        except BaseException:
            self.sender.close()
            raise
