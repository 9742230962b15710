"""Takes an engine out of the routes before its sidecar stops it."""

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
    """One sidecar's. Once it has ``begun``, heartbeats say that the engine is closed."""

    def __init__(self) -> None:
        self.begun = False
        self._answered = asyncio.Event()

    def on_ack(self, ack: HeartbeatAck) -> None:
        """The broker answers a heartbeat; one of a closed engine when that is out of the routes,
        and watchers that it waits for have taken that in."""
        if self.begun and ack.closed:
            self._answered.set()

    async def announce(self, peer: PeerClient, beat: Callable[[], Heartbeat], death: str) -> None:
        """Say that the engine stops, and return when that is answered, or after two heartbeats;
        at once, if the engine has died, or no broker has let it in."""
        if death or peer.link.state is not LinkState.JOINED:
            return
        self.begun = True
        peer.send(beat())
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(2 * peer.link.heartbeat_ms / 1000):
                await self._answered.wait()
