"""Removes an engine from the routes before its sidecar stops the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

from bus.protocol.core.link import LinkState

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Heartbeat, HeartbeatAck
    from bus.runtime.peer import PeerClient


class Departure:
    """Announces that an engine is about to stop.

    Attributes:
        begun: whether the announcement has begun; from then on heartbeats report closed admission.
    """

    def __init__(self) -> None:
        self.begun = False
        self._answered = asyncio.Event()

    def on_ack(self, ack: HeartbeatAck) -> None:
        """Handles the answer to a heartbeat.

        The broker answers a heartbeat of a closed engine once the engine is out of the routes and
        the watchers that the broker waits for have confirmed that.
        """
        if self.begun and ack.closed:
            self._answered.set()

    async def announce(self, peer: PeerClient, beat: Callable[[], Heartbeat], death: str) -> None:
        """Sends a last heartbeat, and waits for its answer for at most two heartbeat intervals.

        Returns at once if the engine has died or the peer has not joined.

        Args:
            peer: the sidecar's peer.
            beat: makes the heartbeat.
            death: why the engine died; empty if it is alive.
        """
        if death or peer.link.state is not LinkState.JOINED:
            return
        self.begun = True
        peer.send(beat())
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(2 * peer.link.heartbeat_ms / 1000):
                await self._answered.wait()
