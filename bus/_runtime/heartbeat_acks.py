"""Gathers answers to heartbeats, to send equal answers as one frame to many peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._protocol.core.effects import Send

if TYPE_CHECKING:
    from bus.messages import HeartbeatAck


class HeartbeatAcks:
    """The answers to heartbeats that wait to be sent. Equal ones are sent as one frame."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[HeartbeatAck, str, int], list[bytes]] = {}

    def add(self, ack: HeartbeatAck, send: Send) -> None:
        """Adds an answer to be sent.

        Args:
            send: the effect with the answer; names its receivers, group and epoch.
        """
        self._waiting.setdefault((ack, send.group, send.epoch), []).extend(send.routes)

    def take(self) -> list[Send]:
        """Returns and removes all answers, in the order of arrival."""
        waiting, self._waiting = self._waiting, {}
        return [
            Send(ack, tuple(routes), 0, group, epoch)
            for (ack, group, epoch), routes in waiting.items()
        ]
