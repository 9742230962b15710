"""The broker of the benches: the real one, in a process of its own.

``python -m sidecar.bench.broker LOOP [HEARTBEAT_MS]``; says its address, serves until
stdin ends. With keys, if ``WAVEBUS_CURVE_KEYS`` names a folder of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import bus.log
from bus.keys import read_keyring
from bus.protocol.broker import BrokerConfig
from bus.runtime import loop
from bus.runtime.aio import AsyncioScheduler
from bus.runtime.broker import BrokerServer
from bus.runtime.lines import answer, commands
from bus.runtime.zmq_transport import ZmqServer

if TYPE_CHECKING:
    from bus.runtime.loop import LoopChoice


async def serve(config: BrokerConfig) -> None:
    """Serve on a free port."""
    folder = os.environ.get("WAVEBUS_CURVE_KEYS")
    keyring = read_keyring(Path(folder)) if folder else None
    transport = ZmqServer("tcp://127.0.0.1:*", keyring=keyring)
    roles = keyring.roles() if keyring else None
    server = BrokerServer(transport, AsyncioScheduler(), config, roles)
    server.start()
    answer(address=transport.address)
    async for _ in commands():
        pass
    server.close()


if __name__ == "__main__":
    bus.log.configure(json=True)
    kind, *heartbeat = sys.argv[1:]
    chosen = BrokerConfig(heartbeat_ms=int(heartbeat[0])) if heartbeat else BrokerConfig()
    loop.run(serve(chosen), loop=cast("LoopChoice", kind))
