"""Synchronizes a trainer's ranks: rank 0 leads an update, the others gather tensors with it.

With FSDP, a full tensor is gathered in a collective of all ranks. So no rank may begin before every
engine is ready: the other ranks wait for GO, which the broker relays. And no rank may stop in the
middle: if the update fails, rank 0 gathers the remaining tensors nevertheless. See
:mod:`bus._protocol.group.trainer_session`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from bus.errors import refusal
from bus.messages import AwaitStep, TrainerPoint, TrainerStep
from trainer_agent._failures import nack_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_agent._connection import Connection
    from trainer_agent._weights.source import WeightSource

_DRAIN_S: Final = 30.0


class RankZero:
    """Rank 0's part in one update of a trainer with several ranks.

    Rank 0 leads the update and sends the weights. The other ranks gather full tensors together with
    rank 0, or send their own shards (vLLM's ``nccl_m2n``).

    Args:
        connection: rank 0's connection to the broker.
        number: the number of the update. All ranks count their updates, so they agree on it.
        alone: True: no other rank takes part in the update, and the methods do nothing.
    """

    def __init__(self, connection: Connection, number: int, *, alone: bool) -> None:
        self._connection = connection
        self._number = number
        self._alone = alone
        self._drain: Callable[[], None] | None = None
        connection.lost_rank = None

    async def release(self, drain: Callable[[], None]) -> None:
        """Permits the other ranks to gather tensors, because every engine is ready for the update.

        A rank that gathers blocks until all ranks enter its collective. So no rank may begin
        earlier.

        Args:
            drain: reads all tensors that rank 0 has not gathered yet. If the update fails,
                :meth:`finish` calls it in a thread, because the other ranks would otherwise block
                in their collectives.
        """
        if not self._alone:
            self._drain = drain
            await self._send_go()

    async def share_rendezvous(self, meeting: bytes) -> None:
        """Sends the other ranks the encoded address where they connect to the engines."""
        if not self._alone:
            await self._send_go(meeting)

    async def finish(self, version: int, error: BaseException | None) -> None:
        """Reports to the other ranks that the update is committed, or that it failed.

        Args:
            error: why the update failed; the other ranks raise it. None: the update is committed.
        """
        if self._alone:
            return
        if error is not None and self._drain is not None:
            # The update's error is the one to report, even if the source fails here as well.
            with (
                anyio.move_on_after(_DRAIN_S, shield=True),
                contextlib.suppress(Exception),
            ):
                await anyio.to_thread.run_sync(self._drain, abandon_on_cancel=True)
        failure = None if error is None else nack_of(error)
        # If this can't be delivered, the broker tells the other ranks that rank 0 is gone.
        await self._connection.delivery.send(
            TrainerStep(self._number, "end", version, failure, b"")
        )

    async def _send_go(self, meeting: bytes = b"") -> None:
        await self._connection.ask(TrainerStep(self._number, "go", 0, None, meeting), TrainerStep)


async def follow_rank_zero(connection: Connection, source: WeightSource, number: int) -> int:
    """Gathers an update's tensors with rank 0, and returns the committed version.

    Args:
        source: this rank's part of the weights.
        number: the number of the update, as :class:`RankZero` counts.

    Raises:
        Refused: the NACK that rank 0 raised, or an :class:`bus.errors.UpdateFailed` with the text
            of rank 0's error.
    """
    await wait_for_rank_zero(connection, number, "go")
    await anyio.to_thread.run_sync(_gather, source)
    return (await wait_for_rank_zero(connection, number, "end")).version


async def wait_for_rank_zero(
    connection: Connection, number: int, point: TrainerPoint
) -> TrainerStep:
    """Waits until rank 0 has reached a point of the update, and returns its message.

    Args:
        number: the number of the update, as :class:`RankZero` counts.
        point: ``go``: all ranks gather tensors now. ``end``: the update is over.

    Raises:
        Refused: as :func:`follow_rank_zero`.
    """
    step = await connection.ask(AwaitStep(number, point), TrainerStep)
    if step.failure is not None:
        raise refusal(step.failure)
    return step


def _gather(source: WeightSource) -> None:
    for _ in source:
        pass
