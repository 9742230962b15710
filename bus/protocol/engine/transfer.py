"""The engine's end of the out-of-band transport: the sidecar's side.

::

    state    event                          next     engine call, ack
    any      TRANSFER_INIT of another       CLOSED   open_transfer(backend, params, place)
             transport
    any      opened                         OPEN     ack transfer_init
    any      opening failed                 CLOSED   nack transfer_init
    OPEN     TRANSFER_INIT of the same      OPEN     ack transfer_init, again
             transport

A transport belongs to one sender. An engine that was out of reach may still have the transport of
a trainer that is gone, or an earlier one of the same trainer, and would read what that sender has
left in its memory. So each ARM names the TRANSFER_INIT that opened its sender's transport, and an
engine that has any other transport open refuses. The trainer then opens its transport anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import NackCode, Step, TransferInit
from bus.protocol.core.failures import decline
from bus.protocol.engine.calls import CallOpenTransfer, CallQueue, SessionEffect, ack
from bus.weight_transfer.allocation import NO_RANK, RankAssignment

if TYPE_CHECKING:
    from bus.protocol.core.effects import Send
    from bus.protocol.engine.update_spec import UpdateSpec


class EngineTransfer:
    """Opens the transport of the engine ``name``; adds the engine calls to ``queue``.

    Attributes:
        epoch: the fencing epoch of the command that is executed.
    """

    def __init__(self, queue: CallQueue, name: str) -> None:
        self._queue = queue
        self._name = name
        self._open: CallOpenTransfer | None = None
        self._asked: tuple[CallOpenTransfer, int] | None = None  # the last one, and its epoch
        self.epoch = 0

    def open(self, msg_id: int, message: TransferInit) -> list[SessionEffect]:
        """Opens the transport of a TRANSFER_INIT, whose message id is ``msg_id``.

        If that transport is open, only acknowledges the message again.

        Raises:
            Declined: the engine has no place in the communicator.
        """
        opening = self._opening(message)
        if self._open == opening:
            return [ack(msg_id, Step.TRANSFER_INIT, opening.update_id)]
        self._open, self._asked = None, (opening, self.epoch)
        if opening not in self._queue:
            self._queue.add(opening, msg_id)
        return []

    def is_open(self, message: TransferInit) -> bool:
        """Whether the open transport is the one of this TRANSFER_INIT.

        Raises:
            Declined: as :meth:`open`.
        """
        return self._open == self._opening(message)

    def _opening(self, message: TransferInit) -> CallOpenTransfer:
        place = NO_RANK
        if message.communicator:
            first_rank = message.first_ranks.get(self._name)
            if first_rank is None:  # 0 is the sender's
                raise decline(
                    NackCode.MALFORMED,
                    f"{self._name} has no place in the communicator",
                    field="first_ranks",
                )
            place = RankAssignment(message.communicator, message.world_size, first_rank)
        return CallOpenTransfer(message.update_id, message.backend, message.params, place)

    def on_opened(self, msg_id: int, call: CallOpenTransfer, took_ms: float) -> Send:
        """Records that the transport is open, and returns the ACK."""
        self._open = call
        return ack(msg_id, Step.TRANSFER_INIT, call.update_id, took_ms=took_ms)

    def on_open_failed(self) -> None:
        """Records that the opening failed: no transport is open."""
        self._open = None

    def require(self, update: UpdateSpec) -> None:
        """Checks that the transport of an update is open, and binds the update to it.

        Raises:
            Declined: code ``transfer_closed``: none is open, or another one.
        """
        opened = self._open
        if opened is None or opened.backend != update.backend:
            field, found = "backend", f"no {update.backend} transport is open here"
        elif opened.assignment.communicator != update.communicator:
            field, found = "communicator", "the transport was made for another communicator"
        elif update.transfer and update.transfer != opened.update_id:
            field, found = "transfer", f"an earlier transport, {opened.update_id}, is open here"
        elif not update.transfer and self._asked != (opened, self.epoch):
            # The trainer or the broker is one wire version older.
            field, found = "transfer", "the transport of an earlier trainer is open here"
        else:
            update.transfer = opened.update_id
            return
        hint = "send TRANSFER_INIT first"
        raise decline(NackCode.TRANSFER_CLOSED, found, field=field, hint=hint)
