"""What is fuzzed, in a process of its own: a broker, or a sidecar.

A program (:mod:`lab.bench.programs`): ``broker`` says its address, ``sidecar`` joins. Each
tells its memory, and what has gone wrong in its loop. No limits, so that every frame is read.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import bus.log
from bus._ids import new_boot
from bus._protocol.core.access import Limits, Rate
from bus._protocol.core.config import BrokerConfig
from bus._runtime.broker_server import rss_bytes
from bus._runtime.peer import route_of
from bus._runtime.zmq_transport import ZmqClient
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from tests.support.broker import a_broker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus._runtime.interfaces import OnFrame

ENDLESS = Rate(1e12, 1e12)


class Counting(ZmqClient):
    """Counts the frames that are read."""

    frames = 0

    def listen(self, on_frame: OnFrame) -> None:
        def counted(frame: bytes) -> None:
            Counting.frames += 1
            on_frame(frame)

        super().listen(counted)


@contextlib.asynccontextmanager
async def a_target(kind: str, *address: str) -> AsyncIterator[str]:
    """It, and its address or name."""
    if kind == "broker":
        config = BrokerConfig(peer_timeout_ms=60_000, limits=Limits(ENDLESS, ENDLESS, ENDLESS))
        async with a_broker(config=config) as (_, here):
            yield here
    else:
        boot = new_boot()
        transport = Counting(address[0], route_of("fuzzed", boot))
        async with Sidecar(StubEngine(), name="fuzzed", transport=transport):
            yield "fuzzed"


class Fuzzed:
    """Says what it is."""

    def __init__(self, what: str) -> None:
        self.hello = {"what": what}
        self._broken: list[str] = []
        asyncio.get_running_loop().set_exception_handler(self._note)

    def state(self) -> dict[str, Any]:
        return {"rss_bytes": rss_bytes(), "broken": self._broken[:5], "frames": Counting.frames}

    def _note(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._broken.append(f"{context['message']}: {context.get('exception')!r}")


async def fuzzed(stack: contextlib.AsyncExitStack, kind: str, address: str) -> Fuzzed:
    """Start it."""
    bus.log.configure(level="error", json=True)
    addresses = (address,) if address else ()
    return Fuzzed(await stack.enter_async_context(a_target(kind, *addresses)))
