"""Honest peers beside dishonest ones: they join, beat, and note whenever their link breaks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from bus._ids import new_boot
from bus._protocol.core.link import LinkState
from bus._runtime.clock import AsyncioScheduler
from bus._runtime.peer import PeerClient, route_of
from bus._runtime.zmq_transport import ZmqClient
from bus.messages import Heartbeat
from tests.unit.bus._builders import engine_join

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus._keys import Security

LIMIT_S: Final = 60.0


class Honest:
    """One engine's peer. ``states``: all that its link has been in."""

    def __init__(self, address: str, name: str, security: Security | None) -> None:
        self.states: list[LinkState] = []
        self.changed = asyncio.Event()
        boot = new_boot()
        self.peer = PeerClient(
            name=name,
            group="honest",
            boot=boot,
            transport=ZmqClient(address, route_of(name, boot), security),
            scheduler=AsyncioScheduler(),
            join=lambda: engine_join(dp_group=name),
            beat=lambda: Heartbeat("running", 0, 0, ""),
            on_message=lambda _envelope, _message: None,
            on_state=self._on_state,
        )

    def _on_state(self, state: LinkState) -> None:
        self.states.append(state)
        self.changed.set()


@contextlib.asynccontextmanager
async def honest_peers(
    address: str, count: int, security: Security | None = None
) -> AsyncIterator[list[Honest]]:
    """So many of them, joined. At the end each must have joined once, and stayed."""
    peers = [Honest(address, f"honest-{number}", security) for number in range(count)]
    try:
        for each in peers:
            each.peer.start()
        async with asyncio.timeout(LIMIT_S):
            for each in peers:
                await each.changed.wait()
        yield peers
        assert [each.states for each in peers] == [[LinkState.JOINED]] * count
    finally:
        for each in peers:
            each.peer.close()
