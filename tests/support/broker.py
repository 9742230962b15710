"""A broker in the test's own loop, over real sockets."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bus._protocol.core.config import BrokerConfig
from bus._runtime.broker_server import BrokerServer
from bus._runtime.clock import AsyncioScheduler
from bus._runtime.zmq_transport import ZmqServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus._keys import Keyring

# This process, or another one, may get no processor for some seconds.
PATIENT = BrokerConfig(peer_timeout_ms=10_000)


@contextlib.asynccontextmanager
async def a_broker(
    listen: str = "tcp://127.0.0.1:*",
    *,
    keyring: Keyring | None = None,
    config: BrokerConfig = PATIENT,
) -> AsyncIterator[tuple[BrokerServer, str]]:
    """It and its address, for the length of a block."""
    transport = ZmqServer(listen, keyring=keyring)
    roles = keyring.roles() if keyring else None
    server = BrokerServer(transport, AsyncioScheduler(), config, roles)
    server.start()
    try:
        yield server, transport.address
    finally:
        server.close()
