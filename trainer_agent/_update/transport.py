"""The trainer's end of the transport; keeps track of the transport that engines have open."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from bus._weight_transfer.allocation import ALONE, World
from bus._weight_transfer.rendezvous import address_towards, host_of
from bus.errors import Refused, UsageError, WavebusError
from bus.messages import NackCode, PlanTransfer, TransferDrain, TransferInit, TransferPlan
from trainer_agent._update.steps import flat_task_group, run_to_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bus._weight_transfer.base import Sender
    from trainer_agent._update.lora import Adapter
    from trainer_agent._update.plan import UpdatePlan
    from trainer_agent._update.steps import Steps
    from trainer_agent._update.update import Update

    Leave = Callable[[], object] | None

_OPENINGS: Final = 3
_PORTS: Final = 2
DRAIN_S: Final = 30.0  # how long a sender may take for a broadcast that engines discard
_MAX_PORT: Final = 65_535


def _stay() -> None:
    """Does nothing about the broadcast of a trainer engine that has no way to leave it."""


class Transport:
    """Opens and closes the transport of one trainer agent.

    Engines have one transport open at a time: the agent's own, or that of a vLLM trainer engine,
    which opens its sender itself.

    Args:
        backend: the agent's backend.
        sender: the agent's sender.
        steps: sends the requests.
        scope: the DP groups that open the transport; empty: all.
        ports: the ports at which engines meet the agent's sender of collectives; 0: any free port.

    Raises:
        UsageError: the ports are none, or equal.

    Attributes:
        own_backend: the agent's backend.
        ports: as given.
        backend: the backend of the open transport.
        communicator: the number of the open transport's communicator.
        opening: the id of the TRANSFER_INIT that opened it, which tells it from any other one.
        is_foreign: whether the open transport is not the agent's own, but that of a vLLM trainer
            engine.
    """

    def __init__(
        self,
        backend: str,
        sender: Sender,
        steps: Steps,
        scope: tuple[str, ...] = (),
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        if len(ports) != _PORTS or any(not 0 <= port <= _MAX_PORT for port in ports):
            raise UsageError(f"ports={ports}: two ports, each 0 to {_MAX_PORT}")
        if ports[0] and ports[0] == ports[1]:
            raise UsageError(f"ports={ports}: must differ")
        self.ports = ports
        self.sender = sender
        self.backend = backend
        self.communicator = 0
        self.opening = ""
        self.is_foreign = False
        self.own_backend = backend
        self._connection = steps.connection
        self._steps = steps
        self._buffer_bytes = 0
        self._scope = scope
        self._adapter: Adapter | None = None  # what the transport is opened for; None: the model
        self._packs_model = sender.packed
        self._leave_foreign: Callable[[], object] = _stay

    def sender_for(self, adapter: Adapter | None) -> Sender:
        """Returns the sender of the next update, whose chunks are not planned yet.

        An adapter is always packed, because its tensors may be on any device.

        Args:
            adapter: what the update brings; None: weights of a model.
        """
        before, self._adapter = self._adapter, adapter
        if adapter is not before and (adapter is None or not adapter.opens_like(before)):
            self.invalidate()  # engines open another transport in its place
        self.sender.packed = self._packs_model or adapter is not None
        return self.sender

    async def open(self, buffer_bytes: int) -> None:
        """Opens the agent's transport if it is closed or its buffers are below ``buffer_bytes``."""
        if self._buffer_bytes < buffer_bytes:
            await self.reopen(buffer_bytes)

    async def reopen(self, buffer_bytes: int) -> None:
        """Opens the agent's transport to the engines that have joined.

        Starts again if an engine joins or leaves meanwhile. ``buffer_bytes`` is the size of each
        buffer.
        """
        self.invalidate()
        for left in reversed(range(_OPENINGS)):
            world = ALONE
            if self.sender.is_collective:
                world = replace(await self.plan(), ports=self.ports)
            params = await run_to_end(self.sender.open, buffer_bytes, world)
            backend, adapter = self.own_backend, self._adapter
            if adapter is not None:
                backend, params = adapter.backend, adapter.init(backend, params)
            try:
                init = self._init(backend, params, world.number)
                await self._meet_all(init)
                break
            except Refused as refused:
                if refused.code is not NackCode.TRANSFER_CLOSED or not left:
                    raise
        self.sender.on_opened()
        self._buffer_bytes = buffer_bytes
        self._note_opened(init)

    def _init(self, backend: str, params: bytes, communicator: int = 0) -> TransferInit:
        update_id = self._steps.new_id()
        return TransferInit(update_id, backend, params, communicator, 0, {}, self._scope)

    def _note_opened(self, init: TransferInit) -> None:
        self.backend, self.communicator = init.backend, init.communicator
        self.opening = init.update_id

    async def open_foreign(self, init: TransferInit, leave: Leave = None) -> None:
        """Makes engines open their ends of a transport that this agent's sender does not serve.

        That is the transport of a vLLM trainer engine. The agent's own sender is closed.

        Args:
            init: the message to engines.
            leave: makes that trainer engine leave its broadcast, from any thread; None: it can't.
        """
        self.invalidate()
        self.sender.close()
        self._leave_foreign = leave or _stay
        await self._steps.step(init)
        self._note_opened(init)
        self.is_foreign = True

    async def open_removal(self, backend: str) -> None:
        """Makes engines open the transport of a removal, over which nothing is sent.

        Args:
            backend: names the adapter to remove, as :func:`bus._lora.removal_backend` does.
        """
        self.invalidate()
        removal = self._init(backend, b"")
        await self._steps.step(removal)
        self._note_opened(removal)

    async def drain(self, handle: bytes) -> None:
        """Makes engines receive over the open transport, and discard what its sender sends.

        If this fails, the transport is unusable.

        Args:
            handle: what the sender sends.

        Raises:
            Refused: an engine can't, or the sender has not sent all in time.
            BusTimeout: an engine did not answer.
        """
        opened = self.opening, self.backend, self.communicator
        drain = TransferDrain(self._steps.new_id(), *opened, handle, int(DRAIN_S * 1000))
        try:
            await self._steps.step(drain)
        except BaseException:
            self.invalidate()
            raise

    async def arm(
        self, update: Update, plan: UpdatePlan, label: str, reopen: Callable[[], Awaitable[None]]
    ) -> None:
        """Arms an update over the open transport.

        If an engine has no transport open, or an earlier one, opens the transport again, once. That
        engine has joined since, or was out of reach when the transport was opened.

        Args:
            update: the update.
            plan: the tensors and chunks of the update.
            label: the trainer's own name of the weights.
            reopen: opens the transport again.
        """
        try:
            await update.arm(plan, self, label)
        except Refused as refused:
            if refused.code is not NackCode.TRANSFER_CLOSED:
                raise
            await reopen()
            await update.arm(plan, self, label)

    async def plan(self, senders: int = 1) -> World:
        """Asks the broker for a communicator, and returns its members.

        Args:
            senders: how many ranks of the trainer take part in it.
        """
        plan = await self._connection.ask(PlanTransfer(self._scope), TransferPlan)
        address = address_towards(host_of(self._connection.address))
        return World(
            plan.communicator,
            plan.world_size - 1 + senders,
            address,
            senders,
            first_ranks=plan.first_ranks,
        )

    def invalidate(self) -> None:
        """Marks the open transport as unusable, so that the next update opens it again."""
        self._buffer_bytes = 0
        self.is_foreign = False

    async def discard(self) -> None:
        """Invalidates the transport and closes the sender, which ends a broadcast under way.

        Also one of a vLLM trainer engine that can leave it.
        """
        leave = self._leave_foreign if self.is_foreign else self.sender.close
        self.invalidate()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(leave)

    def close(self) -> None:
        """Closes the sender."""
        self.sender.close()

    async def _meet_all(self, init: TransferInit) -> None:
        """Makes every engine open its end; a collective sender connects to them meanwhile.

        If the sender can't connect, this still waits for the engines, because the broker accepts no
        other request before they have answered. They answer soon, as the sender is closed then.
        """
        failed: list[WavebusError] = []
        async with flat_task_group() as tasks:
            if self.sender.is_collective:
                tasks.start_soon(self._meet, failed)
            try:
                await self._steps.step(init)
            except WavebusError:
                if not failed:
                    raise
        if failed:
            raise failed[0]

    async def _meet(self, failed: list[WavebusError]) -> None:
        """Waits in a thread until all ends are connected. Closing the sender ends the wait."""
        try:
            await anyio.to_thread.run_sync(self.sender.meet, abandon_on_cancel=True)
        except WavebusError as error:
            failed.append(error)
            self.sender.close()
        except BaseException:
            self.sender.close()
            raise
