"""The program of a bench's broker, on a free port of this host."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from bus._ids import new_boot
from bus._journal.writer import DEFAULT_BYTES, JournalWriter
from bus._keys import read_keyring
from bus._protocol.core.config import BrokerConfig
from bus._runtime.clock import AsyncioScheduler
from bus._runtime.zmq_transport import ZmqServer

if TYPE_CHECKING:
    from contextlib import AsyncExitStack


async def broker(
    stack: AsyncExitStack, heartbeat_ms: int = BrokerConfig().heartbeat_ms, journal: str = ""
) -> SimpleNamespace:
    """Runs a broker, with keys if ``WAVEBUS_CURVE_KEYS`` names a folder of them.

    Args:
        stack: ends the broker.
        heartbeat_ms: the interval of peers' heartbeats, in ms.
        journal: folder of the journal; empty: none.
    """
    from bus._runtime.broker_server import BrokerServer  # noqa: PLC0415 - only this process needs it

    config, scheduler, boot = BrokerConfig(heartbeat_ms), AsyncioScheduler(), new_boot()
    curve_keys = os.environ.get("WAVEBUS_CURVE_KEYS")
    keyring = read_keyring(Path(curve_keys)) if curve_keys else None
    roles = keyring.roles() if keyring else None
    recorder = None
    if journal:
        recorder = JournalWriter(
            Path(journal),
            limit_bytes=DEFAULT_BYTES,
            boot=boot,
            config=config,
            keys=roles,
            scheduler=scheduler,
            on_failure=_fail,
        )
    transport = ZmqServer("tcp://127.0.0.1:*", keyring=keyring)
    server = BrokerServer(transport, scheduler, config, roles, boot=boot, journal=recorder)
    server.start()
    stack.callback(server.close)
    return SimpleNamespace(hello={"address": transport.address})


def _fail(error: OSError) -> None:
    """Ends the process, because a broker without its journal would be faster."""
    raise SystemExit(f"the journal can't be written: {error}")
