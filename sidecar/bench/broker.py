"""The broker of the benches: the real one, in a process of its own.

``python -m sidecar.bench.broker LOOP [HEARTBEAT_MS [JOURNAL]]``; says its address, serves until
stdin ends. JOURNAL is the folder of its journal; without it there is none. With keys, if
``WAVEBUS_CURVE_KEYS`` names a folder of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import bus.log
from bus.ids import new_boot
from bus.journal.writer import DEFAULT_BYTES, JournalWriter
from bus.keys import read_keyring
from bus.protocol.broker.config import BrokerConfig
from bus.runtime import event_loop
from bus.runtime.broker_server import BrokerServer
from bus.runtime.clock import AsyncioScheduler
from bus.runtime.json_lines import read_commands, write_answer
from bus.runtime.zmq_transport import ZmqServer

if TYPE_CHECKING:
    from bus.runtime.event_loop import LoopChoice


async def serve(config: BrokerConfig, folder: Path | None) -> None:
    """Serve on a free port."""
    curve_keys = os.environ.get("WAVEBUS_CURVE_KEYS")
    keyring = read_keyring(Path(curve_keys)) if curve_keys else None
    transport = ZmqServer("tcp://127.0.0.1:*", keyring=keyring)
    roles = keyring.roles() if keyring else None
    scheduler, boot = AsyncioScheduler(), new_boot()
    journal = None
    if folder is not None:
        journal = JournalWriter(
            folder,
            limit_bytes=DEFAULT_BYTES,
            boot=boot,
            config=config,
            keys=roles,
            scheduler=scheduler,
            on_failure=_fail,
        )
    server = BrokerServer(transport, scheduler, config, roles, boot=boot, journal=journal)
    server.start()
    write_answer(address=transport.address)
    async for _ in read_commands():
        pass
    server.close()


def _fail(error: OSError) -> None:
    """A bench of a journal that is not written would measure nothing."""
    raise SystemExit(f"the journal can't be written: {error}")


if __name__ == "__main__":
    bus.log.configure(json=True)
    kind, *rest = sys.argv[1:]
    chosen = BrokerConfig(heartbeat_ms=int(rest[0])) if rest else BrokerConfig()
    place = Path(rest[1]) if rest[1:] else None
    event_loop.run(serve(chosen, place), loop=cast("LoopChoice", kind))
