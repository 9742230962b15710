"""Delivers undo commands (ABORT, RESUME, TRAINER_STEP) even while the broker is down.

:meth:`GuaranteedDelivery.send` waits for the answer while the broker is reachable. Otherwise it
returns ``BusTimeout`` and repeats the commands in the background until the broker answers, because
the broker may still keep engines paused for this trainer. New requests wait until all commands are
answered, so that they cannot overtake an undo.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeAlias

import anyio

import bus.log
from bus._protocol.core.config import BROKER_NAME
from bus.errors import BusClosed, BusTimeout, Refused, WavebusError
from bus.messages import Abort, GroupAck, Message, Resume, TrainerStep

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

UndoMessage: TypeAlias = Abort | Resume | TrainerStep

# How long to wait for the answers of a broker that is reachable.
CLEANUP_S: Final = 30.0
_POLL_S: Final = 0.05


class GuaranteedDelivery:
    """Repeats ABORT, RESUME and TRAINER_STEP until the broker answers them.

    Args:
        ask: repeats a request until it is answered, as :meth:`Connection.ask` does.
        is_joined: returns whether the broker has accepted the join and sends frames.
    """

    def __init__(
        self, ask: Callable[..., Awaitable[Message]], is_joined: Callable[[], bool]
    ) -> None:
        self._ask, self._is_joined = ask, is_joined
        self._open_tasks: set[asyncio.Task[WavebusError | None]] = set()
        self._log = bus.log.logger()

    async def send(self, *messages: UndoMessage) -> WavebusError | None:
        """Sends messages in this order, and waits for the answers while the broker is reachable.

        Cancelling the caller does not stop the delivery.

        Returns:
            The first error; ``BusTimeout`` if answers are missing; None if all were answered.
        """
        sending = asyncio.ensure_future(self._send_all(messages))
        self._open_tasks.add(sending)
        sending.add_done_callback(self._open_tasks.discard)
        with anyio.move_on_after(CLEANUP_S, shield=True):
            while not sending.done() and self._is_joined():
                await asyncio.wait([sending], timeout=_POLL_S)
        if sending.done():
            return sending.result()
        self._log.warning("undone_later", messages=[type(message).__name__ for message in messages])
        return BusTimeout(
            "the broker has not answered; it gets this message as soon as it answers",
            peer=BROKER_NAME,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Waits until all messages are answered; returns False if ``timeout_s`` ends first."""
        if self._open_tasks:
            await asyncio.wait(self._open_tasks, timeout=timeout_s)
        return all(each.done() for each in self._open_tasks)

    async def _send_all(self, messages: tuple[UndoMessage, ...]) -> WavebusError | None:
        # Send all at once: a broker may receive them although its answers are lost.
        refused = await asyncio.gather(
            *(self._send_until_answered(message) for message in messages)
        )
        return next((each for each in refused if each is not None), None)

    async def _send_until_answered(self, message: UndoMessage) -> WavebusError | None:
        expect = TrainerStep if isinstance(message, TrainerStep) else GroupAck
        while True:
            try:
                answer = await self._ask(message, expect, timeout_s=CLEANUP_S, even_if_silent=True)
            except BusTimeout as late:
                if late.peer != BROKER_NAME:  # the broker has it, and waits for an engine
                    return late
            except (Refused, BusClosed) as error:
                return error
            else:
                if isinstance(message, Resume) and isinstance(answer, GroupAck) and answer.excluded:
                    self._log.warning("engines_not_resumed", engines=list(answer.excluded))
                return None
