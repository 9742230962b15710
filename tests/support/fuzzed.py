"""What is fuzzed, in a process of its own: a broker, or a sidecar.

``python -m tests.support.fuzzed broker`` says its address; ``… sidecar ADDRESS`` joins. Asked by a
line, each answers with its memory and what has gone wrong in its loop. No limits, so that every
frame is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import bus.log
from bus.ids import new_boot
from bus.protocol.broker.config import BrokerConfig
from bus.protocol.core.access import Limits, Rate
from bus.runtime.broker_server import rss_bytes
from bus.runtime.json_lines import read_commands, write_answer
from bus.runtime.peer import route_of
from bus.runtime.zmq_transport import ZmqClient
from sidecar import Sidecar
from sidecar.bench.control.sidecars import StubEngine
from tests.support.broker import a_broker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.runtime.interfaces import OnFrame

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
        config = BrokerConfig(limits=Limits(ENDLESS, ENDLESS, ENDLESS))
        async with a_broker(config=config) as (_, here):
            yield here
    else:
        boot = new_boot()
        transport = Counting(address[0], route_of("fuzzed", boot))
        async with Sidecar(StubEngine(), name="fuzzed", transport=transport):
            yield "fuzzed"


async def serve(*arguments: str) -> None:
    """Until stdin ends."""
    broken: list[str] = []

    def note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        broken.append(f"{context['message']}: {context.get('exception')!r}")

    asyncio.get_running_loop().set_exception_handler(note)
    async with a_target(*arguments) as what:
        write_answer(what=what)
        async for _ in read_commands():
            write_answer(rss_bytes=rss_bytes(), broken=broken[:5], frames=Counting.frames)


if __name__ == "__main__":
    bus.log.configure(level="error", json=True)
    asyncio.run(serve(*sys.argv[1:]))
