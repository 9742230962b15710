"""A trainer's agent that records when it sends an update's chunks.

A trainer of a bench answers an update with its times: ``since_s`` and ``until_s``, its begin and
end, in seconds on ``time.monotonic()``'s clock; ``receive_ms``, from the first chunk's sending to
the last acknowledgement; ``window_ms``, how long engines were paused; and ``calls``: name, begin
and end of each call. An update over the bus adds what :class:`trainer_agent.UpdateReport` has.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, cast

from trainer_agent._agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from bus._weight_transfer.base import Sender
    from trainer_agent._options import How
    from trainer_agent._weights.source import Weights

BOOT_S: Final = 600.0


class TimedSender:
    """Wraps the sender of a transfer backend, and records when it puts and transfers chunks.

    Attributes:
        inner: the wrapped sender.
        puts: begin and end of each put, in seconds on ``time.monotonic()``'s clock.
        transfers: begin and end of each transfer; one begins when its chunk is queued.
        acked_s: when the last acknowledgement of a chunk came, on the same clock.
    """

    def __init__(self, sender: Sender) -> None:
        self.inner = sender
        self.puts: list[tuple[float, float]] = []
        self.transfers: list[tuple[float, float]] = []
        self.acked_s = 0.0
        self._queued_s: dict[int, float] = {}

    def begin(self) -> None:
        """Drops the records of the last update, because another update begins."""
        self.puts.clear()
        self.transfers.clear()

    def transfer_ms(self) -> float:
        """Returns :meth:`receive_ms` plus the time of the puts before it, in ms.

        The trainer makes these puts while the engine still serves.
        """
        left_s = self.transfers[0][0]
        before_s = sum(min(until, left_s) - since for since, until in self.puts if since < left_s)
        return self.receive_ms() + before_s * 1000

    def receive_ms(self) -> float:
        """Returns the time from the first chunk's sending to the last acknowledgement, in ms."""
        return (self.acked_s - self.transfers[0][0]) * 1000

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        """Puts a chunk's tensors where receivers can fetch them; records the time."""
        since_s = time.monotonic()
        handle = self.inner.put(seq, tensors)
        self.puts.append((since_s, time.monotonic()))
        return handle

    def queue(self, seq: int) -> None:
        """Queues a chunk to be transferred; records when."""
        self._queued_s[seq] = time.monotonic()
        self.inner.queue(seq)

    def transfer(self, seq: int) -> None:
        """Transfers a chunk, and records the time since the chunk was queued."""
        since_s = self._queued_s.pop(seq, None) or time.monotonic()
        self.inner.transfer(seq)
        self.transfers.append((since_s, time.monotonic()))

    def on_taken(self, seq: int) -> None:
        """Handles the acknowledgement of a chunk; records when."""
        self.acked_s = time.monotonic()
        self.inner.on_taken(seq)


class MeasuredAgent(TrainerAgent):
    """A trainer's agent with the attribute ``timed``, a sender that records its times."""

    def __init__(self, broker: str, *, group: str, backend: str, **options: Any) -> None:
        super().__init__(broker, group=group, backend=backend, **options)
        self.timed = TimedSender(self._transport.sender)
        self._transport.sender = cast("Sender", self.timed)

    async def measured_update(
        self, weights: Weights, *, how: How, clear_cache: bool = True
    ) -> dict[str, Any]:
        """Makes an update over the bus, and returns its times, with each put and transfer."""
        timed = self.timed
        timed.begin()
        since_s = time.monotonic()
        await self.update_weights(weights, how=how, clear_cache=clear_cache)
        until_s = time.monotonic()
        calls = [("put", *span) for span in timed.puts]
        calls += [("send", *span) for span in timed.transfers]
        return {
            "since_s": since_s,
            "until_s": until_s,
            "transfer_ms": timed.transfer_ms(),
            "receive_ms": timed.receive_ms(),
            **reported(self),
            "calls": calls,
        }


def reported(agent: TrainerAgent) -> dict[str, Any]:
    """Returns the times that an agent reports of its last update, in ms."""
    report = agent.last_update
    assert report is not None, "an update has just been made"
    return {
        "commit_ms": report.commit_ms,
        "pause_ms": report.pause_ms,
        "window_ms": report.paused_ms,
        "calls": [],
    }
