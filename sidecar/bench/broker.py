"""The broker of the benches: the real one, in a process of its own.

``python -m sidecar.bench.broker LOOP``; says its address, serves until stdin ends.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import bus.log
from bus.runtime import loop
from bus.runtime.aio import AsyncioScheduler
from bus.runtime.broker import BrokerServer
from bus.runtime.lines import answer, commands
from bus.runtime.zmq_transport import ZmqServer

if TYPE_CHECKING:
    from bus.runtime.loop import LoopChoice


async def serve() -> None:
    """Serve on a free port."""
    transport = ZmqServer("tcp://127.0.0.1:*")
    server = BrokerServer(transport, AsyncioScheduler())
    server.start()
    answer(address=transport.address)
    async for _ in commands():
        pass
    server.close()


if __name__ == "__main__":
    bus.log.configure(json=True)
    loop.run(serve(), loop=cast("LoopChoice", sys.argv[1]))
