"""Removes an engine from the routes before its sidecar stops it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

from bus._protocol.core.link import LinkState

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._runtime.peer import PeerClient
    from bus.messages import Heartbeat, HeartbeatAck


class Departure:
    """Announces that an engine is about to stop, and waits for the broker's answer.

    Attributes:
        begun: True from the start of the announcement. The sidecar's heartbeats then report closed
            admission, which removes the engine from the routes.
    """

    def __init__(self) -> None:
        self.begun = False
        self._answered = asyncio.Event()

    def on_ack(self, ack: HeartbeatAck) -> None:
        """Handles the broker's answer to a heartbeat, which ends the wait of :meth:`announce`.

        The broker sets ``closed`` in an answer only when the engine is out of the routes, and each
        watcher has confirmed that or taken too long.

        Args:
            ack: the broker's answer; answers before the announcement are ignored.
        """
        if self.begun and ack.closed:
            self._answered.set()

    async def leave(
        self, peer: PeerClient, beat: Callable[[], Heartbeat], death: str, reason: str
    ) -> None:
        """Calls :meth:`announce`, then leaves the bus, even if the announcement is cancelled.

        Args:
            peer: the sidecar's connection to the broker.
            beat: as in :meth:`announce`.
            death: why the engine died; empty if it is alive.
            reason: why the sidecar leaves, if the engine is alive.
        """
        try:
            await self.announce(peer, beat, death)
        finally:
            peer.close(death or reason)

    async def announce(self, peer: PeerClient, beat: Callable[[], Heartbeat], death: str) -> None:
        """Sends a heartbeat at once; waits up to two heartbeat intervals for the answer.

        Returns at once if the engine has died or the peer has not joined.

        Args:
            peer: the sidecar's connection to the broker.
            beat: makes the heartbeat to send; it must report closed admission once :attr:`begun` is
                set.
            death: why the engine died; empty if it is alive.
        """
        if death or peer.link.state is not LinkState.JOINED:
            return
        self.begun = True
        peer.send(beat())
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(2 * peer.link.heartbeat_ms / 1000):
                await self._answered.wait()
