"""Opens and drains the engine's end of a weight transport: the sidecar's side.

::

    state    event                          next     engine call, ack
    any      TRANSFER_INIT of another       CLOSED   Open
             transport
    any      opened                         OPEN     ack transfer_init
    any      opening failed                 CLOSED   nack transfer_init
    OPEN     TRANSFER_INIT of the same      OPEN     ack transfer_init, again
             transport
    OPEN     TRANSFER_DRAIN                 OPEN     Drain, once
    OPEN     drained                        OPEN     ack transfer_drain
    OPEN     the same TRANSFER_DRAIN        OPEN     ack transfer_drain, again
    OPEN     the drain failed               CLOSED   nack transfer_drain: its sender may wait in a
                                                     broadcast that this engine never enters again

A transport belongs to one sender. An engine that was out of reach may still have the transport of
a trainer that is gone, or an earlier one of the same trainer, and would read what that sender has
left in its memory. So each ARM names the TRANSFER_INIT that opened its sender's transport, and an
engine that has any other transport open refuses. The trainer then opens its transport anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._protocol.core.failures import decline
from bus._protocol.engine.calls import CALL_STEPS, CallQueue, SessionEffect, ack
from bus.messages import NackCode, Step, TransferDrain, TransferInit
from bus.operations import Drain, Open

if TYPE_CHECKING:
    from bus._protocol.core.effects import Send
    from bus.messages import Arm


class EngineTransfer:
    """Opens the transport of the engine ``name``; adds the engine calls to ``queue``."""

    def __init__(self, queue: CallQueue, name: str) -> None:
        self._queue = queue
        self._name = name
        self._open: Open | None = None
        self._drained = ""  # the id of the last drain that has succeeded

    def open(self, msg_id: int, message: TransferInit | TransferDrain) -> list[SessionEffect]:
        """Executes a TRANSFER_INIT or TRANSFER_DRAIN, whose message id is ``msg_id``.

        If the transport is already open, or drained by this message, sends the ACK again.

        Raises:
            Declined: the engine has no rank in the communicator; or the transport to drain is not
                open.
        """
        if isinstance(message, TransferDrain):
            return self._drain(msg_id, message)
        opening = self._opening(message)
        if self._open == opening:
            return [ack(msg_id, Step.TRANSFER_INIT, opening.update_id)]
        self._open = None
        if opening not in self._queue:
            self._queue.add(opening, msg_id)
        return []

    def _drain(self, msg_id: int, message: TransferDrain) -> list[SessionEffect]:
        if message.update_id == self._drained:
            return [ack(msg_id, Step.TRANSFER_DRAIN, message.update_id)]
        if not self.is_open(message):
            found = f"transport {message.transfer} is not open here"
            raise decline(NackCode.TRANSFER_CLOSED, found, field="transfer")
        call = Drain(message.update_id, message.backend, message.handle, message.timeout_ms)
        if call not in self._queue:
            self._queue.add(call, msg_id)
        return []

    def is_open(self, message: TransferInit | TransferDrain) -> bool:
        """Returns whether the transport that a message names is open.

        Raises:
            Declined: as :meth:`open`.
        """
        if isinstance(message, TransferDrain):
            return self._open is not None and self._open.update_id == message.transfer
        return self._open == self._opening(message)

    def _opening(self, message: TransferInit) -> Open:
        opening = message.update_id, message.backend, message.params
        if not message.communicator:
            return Open(*opening)
        if self._name not in message.first_ranks:
            text = f"{self._name} has no rank in the communicator"
            raise decline(NackCode.MALFORMED, text, field="first_ranks")
        first_rank = message.first_ranks[self._name]
        return Open(*opening, message.communicator, message.world_size, first_rank)

    def on_done(self, msg_id: int, call: Open | Drain, took_ms: float) -> Send:
        """Records that the transport is open, or drained, and returns the ACK."""
        if isinstance(call, Drain):
            self._drained = call.update_id
        else:
            self._open = call
        return ack(msg_id, CALL_STEPS[type(call)], call.update_id, took_ms=took_ms)

    def on_failed(self) -> None:
        """Records that the opening, or a drain, failed: no transport is open."""
        self._open = None

    def require(self, arm: Arm) -> None:
        """Checks that the transport that an ARM names is open.

        Raises:
            Declined: code ``transfer_closed``: none is open, or another one.
        """
        opened = self._open
        if opened is None or opened.backend != arm.backend:
            field, found = "backend", f"no {arm.backend} transport is open here"
        elif opened.communicator != arm.communicator:
            field, found = "communicator", "the transport was made for another communicator"
        elif opened.update_id != arm.transfer:
            field, found = "transfer", f"another transport, {opened.update_id}, is open here"
        else:
            return
        hint = "send TRANSFER_INIT first"
        raise decline(NackCode.TRANSFER_CLOSED, found, field=field, hint=hint)
