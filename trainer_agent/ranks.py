"""Trainers of several ranks: rank 0 leads an update, the others gather tensors beside it.

With FSDP a full tensor is gathered in a collective of all ranks. So no rank may begin before
every engine is ready, and none may stop in the middle: the others hear of GO over the bus, and
rank 0, when its update fails, first gathers what is left, for their sake. See
:mod:`bus.protocol.followers`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from bus.errors import BusClosed, BusTimeout, Refused, refusal
from bus.messages import AwaitStep, Nack, NackCode, TrainerPoint, TrainerStep

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from trainer_agent.connection import Connection
    from trainer_agent.sources import WeightSource
    from trainer_agent.stream import ChunkStream

_LAST_WORD_S: Final = 30.0


class Leading:
    """Rank 0's part, around one update. ``alone``: there are no other ranks to tell."""

    def __init__(self, line: Connection, number: int, *, alone: bool) -> None:
        self.version = 0
        self._line = line
        self._number = number
        self._alone = alone
        self._stream: ChunkStream | None = None

    async def __aenter__(self) -> Self:
        return self

    async def go(self, stream: ChunkStream) -> None:
        """Every engine waits for tensors: all ranks may gather them."""
        if not self._alone:
            self._stream = stream
            await self._tell("go", None)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._alone:
            return
        failure = None if exc is None else _nack_of(exc)
        with anyio.move_on_after(_LAST_WORD_S, shield=True):
            if exc is not None and self._stream is not None:
                await anyio.to_thread.run_sync(self._stream.drain)
            # What can't be told, the others hear from the broker when rank 0 is gone.
            with contextlib.suppress(Refused, BusTimeout, BusClosed):
                await self._tell("end", failure)

    async def _tell(self, point: TrainerPoint, failure: Nack | None) -> None:
        step = TrainerStep(self._number, point, self.version, failure)
        await self._line.ask(step, TrainerStep)


async def follow(line: Connection, source: WeightSource, number: int) -> int:
    """Another rank's part: wait, gather, wait; return the version that rank 0 was given.

    Raises:
        Refused: what rank 0 raised, as far as it was a NACK; otherwise an
            :class:`bus.errors.UpdateFailed` with its text.
    """
    await _reached(line, number, "go")
    await anyio.to_thread.run_sync(_gather, source)
    return (await _reached(line, number, "end")).version


async def _reached(line: Connection, number: int, point: TrainerPoint) -> TrainerStep:
    step = await line.ask(AwaitStep(number, point), TrainerStep)
    if step.failure is not None:
        raise refusal(step.failure)
    return step


def _gather(source: WeightSource) -> None:
    for _ in source:
        pass


def _nack_of(error: BaseException) -> Nack:
    if isinstance(error, Refused):
        return error.nack
    return Nack(
        code=NackCode.CANCELLED,
        step="update",
        update_id="",
        chunk=0,
        detail=f"rank 0: {type(error).__name__}: {error}"[:4096],
        field="",
        peer="",
        tensor="",
        hint="",
        retry_after_ms=0,
    )
