"""Trainers of several ranks: rank 0 leads an update, the others gather tensors beside it.

With FSDP a full tensor is gathered in a collective of all ranks. So no rank may begin before
every engine is ready, and none may stop in the middle: the others hear of GO over the bus, and
rank 0, when its update fails, first gathers what is left, for their sake. See
:mod:`bus.protocol.group.trainer_session`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from bus.errors import refusal
from bus.messages import AwaitStep, TrainerPoint, TrainerStep
from trainer_agent.failures import nack_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_agent.connection import Connection
    from trainer_agent.weights.source import WeightSource

_DRAIN_S: Final = 30.0


class RankZero:
    """Rank 0's part, around one update. ``alone``: there are no other ranks to tell."""

    def __init__(self, connection: Connection, number: int, *, alone: bool) -> None:
        self._connection = connection
        self._number = number
        self._alone = alone
        self._drain: Callable[[], None] | None = None
        connection.lost_rank = None

    async def release(self, drain: Callable[[], None]) -> None:
        """Every engine waits for tensors: all ranks may gather them. ``drain`` gathers what
        rank 0 has not gathered yet; it runs in a thread."""
        if not self._alone:
            self._drain = drain
            await self._send_go()

    async def share_rendezvous(self, meeting: bytes) -> None:
        """All ranks may go to where they meet engines."""
        if not self._alone:
            await self._send_go(meeting)

    async def finish(self, version: int, error: BaseException | None) -> None:
        """It is committed, or has failed."""
        if self._alone:
            return
        if error is not None and self._drain is not None:
            # A source that fails here, too, is not what went wrong first.
            with (
                anyio.move_on_after(_DRAIN_S, shield=True),
                contextlib.suppress(Exception),
            ):
                await anyio.to_thread.run_sync(self._drain, abandon_on_cancel=True)
        failure = None if error is None else nack_of(error)
        # What can't be told, the others hear from the broker when rank 0 is gone.
        await self._connection.delivery.send(
            TrainerStep(self._number, "end", version, failure, b"")
        )

    async def _send_go(self, meeting: bytes = b"") -> None:
        await self._connection.ask(TrainerStep(self._number, "go", 0, None, meeting), TrainerStep)


async def follow_rank_zero(connection: Connection, source: WeightSource, number: int) -> int:
    """Another rank's part: wait, gather, wait; return the version that rank 0 was given.

    Raises:
        Refused: what rank 0 raised, as far as it was a NACK; otherwise an
            :class:`bus.errors.UpdateFailed` with its text.
    """
    await wait_for_rank_zero(connection, number, "go")
    await anyio.to_thread.run_sync(_gather, source)
    return (await wait_for_rank_zero(connection, number, "end")).version


async def wait_for_rank_zero(
    connection: Connection, number: int, point: TrainerPoint
) -> TrainerStep:
    """Wait until rank 0 has come so far.

    Raises:
        Refused: as :func:`follow_rank_zero` does.
    """
    step = await connection.ask(AwaitStep(number, point), TrainerStep)
    if step.failure is not None:
        raise refusal(step.failure)
    return step


def _gather(source: WeightSource) -> None:
    for _ in source:
        pass
