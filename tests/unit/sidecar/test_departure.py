"""An engine leaves the routes before its sidecar stops it."""

from __future__ import annotations

import asyncio

from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.followed_routes import FollowedRoutes
from bus._protocol.core.link import LinkState
from bus._runtime.clock import AsyncioScheduler
from bus._runtime.peer import PeerClient, route_of
from bus._runtime.zmq_transport import ZmqClient
from bus.messages import Envelope, Heartbeat, Join, Message, Nack, Routes, RoutesTaken
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from tests.support.broker import a_broker

TIMEOUT_S = 60.0
# Nobody is late for a heartbeat so far away.
PATIENT = BrokerConfig(heartbeat_ms=30_000, peer_timeout_ms=90_000)


class Watcher:
    """Confirms routes when it is told to."""

    def __init__(self, address: str) -> None:
        self.routes: asyncio.Queue[Routes] = asyncio.Queue()
        self.peer = PeerClient(
            name="w",
            group="",
            boot=1,
            transport=ZmqClient(address, route_of("w", 1)),
            scheduler=AsyncioScheduler(),
            join=lambda: Join("observer", "h", 1, None, None),
            beat=lambda: Heartbeat("running", 0, 0, ""),
            on_message=self._on_message,
        )
        self._followed = FollowedRoutes(self.peer.send)

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        assert not isinstance(message, Nack), message
        if routes := self._followed.receive(envelope, message):
            self.routes.put_nowait(routes)

    def confirm(self, routes: Routes) -> None:
        self.peer.send(RoutesTaken("policy", routes.revision))

    async def until(self, *engines: str) -> Routes:
        """The routes, when these are in them."""
        while True:
            routes = await self.routes.get()
            if tuple(each.engine for each in routes.engines) == engines:
                return routes


def test_a_sidecar_ends_when_every_watcher_that_confirms_has_let_its_engine_go() -> None:
    async def main() -> None:
        async with a_broker(config=PATIENT) as (_, address):
            sidecar = Sidecar(StubEngine(), broker=address, name="e0")
            async with sidecar:
                await sidecar.joined()
                watcher = Watcher(address)
                watcher.peer.start()
                watcher.confirm(await watcher.until("e0"))
                closing = asyncio.create_task(sidecar.close())
                routes = await watcher.until()
                assert not closing.done()
                assert sidecar._peer is not None
                assert sidecar._peer.link.state is LinkState.JOINED
                watcher.confirm(routes)
                await closing
                watcher.peer.close()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_sidecar_ends_without_a_broker_that_answers() -> None:
    """After two heartbeats; of an engine that is dead, or not let in, at once."""

    async def main() -> None:
        config = BrokerConfig(heartbeat_ms=200, peer_timeout_ms=60_000)
        async with a_broker(config=config) as (broker, address):
            sidecar = Sidecar(StubEngine(), broker=address, name="e0")
            await sidecar.start()
            await sidecar.joined()
            broker.close()
            await sidecar.close()
        async with a_broker(config=PATIENT) as (broker, address):
            sidecar = Sidecar(StubEngine(), broker=address, name="e0")
            await sidecar.start()
            await sidecar.joined()
            broker.close()
            sidecar.death = "it is dead"
            await sidecar.close()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
