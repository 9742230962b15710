"""What the bus must hear of in any case: asked until it is answered.

While the broker is heard, whoever owes it waits for the answer. A silent one keeps nobody: engines
end their pause when its lease is over. It is told as soon as it is heard again, since it may never
have missed this trainer, and hold its engines for it still; what the trainer asks for next comes
behind that.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, TypeAlias, TypeVar

import anyio

import bus.log
from bus.errors import BusClosed, BusTimeout, Refused, WavebusError
from bus.messages import Abort, GroupAck, Message, Resume, TrainerStep
from bus.protocol.broker.config import BROKER_NAME

UndoMessage: TypeAlias = Abort | Resume | TrainerStep
M = TypeVar("M", bound=Message)

# With a broker that is there, so long is waited for its answers.
CLEANUP_S: Final = 30.0
_POLL_S: Final = 0.05


class Requester(Protocol):
    """What is needed of a :class:`trainer_agent.connection.Connection`."""

    @property
    def is_joined(self) -> bool:
        """Whether the broker has let us in, and is heard."""

    async def ask(
        self,
        message: Message,
        expect: type[M],
        *,
        timeout_s: float | None = None,
        even_if_silent: bool = False,
    ) -> M:
        """Send until answered."""


class GuaranteedDelivery:
    """One connection's."""

    def __init__(self, connection: Requester) -> None:
        self._connection = connection
        self._open_tasks: set[asyncio.Task[WavebusError | None]] = set()
        self._log = bus.log.logger()

    async def send(self, *messages: UndoMessage) -> WavebusError | None:
        """Ask for these, in this order; return when they are answered, or the broker is missed:
        then they are asked for until it is back. No cancelled scope keeps them from it.

        Returns:
            What could not be had; None if all was.
        """
        sending = asyncio.ensure_future(self._send_all(messages))
        self._open_tasks.add(sending)
        sending.add_done_callback(self._open_tasks.discard)
        with anyio.move_on_after(CLEANUP_S, shield=True):
            while not sending.done() and self._connection.is_joined:
                await asyncio.wait([sending], timeout=_POLL_S)
        if sending.done():
            return sending.result()
        self._log.warning("undone_later", messages=[type(message).__name__ for message in messages])
        return BusTimeout("the broker has not answered; it is told when it does", peer=BROKER_NAME)

    async def drain(self, timeout_s: float) -> bool:
        """Whether nothing is owed any more; waits for it."""
        if self._open_tasks:
            await asyncio.wait(self._open_tasks, timeout=timeout_s)
        return all(each.done() for each in self._open_tasks)

    async def _send_all(self, messages: tuple[UndoMessage, ...]) -> WavebusError | None:
        """None waits for the answer to the one before: a broker that can't be heard obeys all."""
        refused = await asyncio.gather(
            *(self._send_until_answered(message) for message in messages)
        )
        return next((each for each in refused if each is not None), None)

    async def _send_until_answered(self, message: UndoMessage) -> WavebusError | None:
        expect = TrainerStep if isinstance(message, TrainerStep) else GroupAck
        while True:
            try:
                answer = await self._connection.ask(
                    message, expect, timeout_s=CLEANUP_S, even_if_silent=True
                )
            except BusTimeout as late:
                if late.peer != BROKER_NAME:  # it knows, and sees to it
                    return late
            except (Refused, BusClosed) as error:
                return error
            else:
                if isinstance(message, Resume) and isinstance(answer, GroupAck) and answer.excluded:
                    self._log.warning("engines_not_resumed", engines=list(answer.excluded))
                return None
