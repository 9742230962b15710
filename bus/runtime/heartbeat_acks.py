"""Answers to heartbeats, gathered: those that are alike are one frame to many peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.protocol.core.effects import Send

if TYPE_CHECKING:
    from bus.messages import HeartbeatAck


class HeartbeatAcks:
    """Those that are yet to be sent, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[HeartbeatAck, str, int], list[bytes]] = {}

    def add(self, ack: HeartbeatAck, send: Send) -> None:
        """This is to be sent."""
        self._waiting.setdefault((ack, send.group, send.epoch), []).extend(send.routes)

    def take(self) -> list[Send]:
        """All that are to be sent; afterwards none are."""
        waiting, self._waiting = self._waiting, {}
        return [
            Send(ack, tuple(routes), 0, group, epoch)
            for (ack, group, epoch), routes in waiting.items()
        ]
