"""Addresses that a server listens at, and peers connect to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bus.errors import UsageError
from bus.runtime.zmq_transport import ZmqClient, ZmqServer

if TYPE_CHECKING:
    from pathlib import Path


async def exchange(listen: str) -> bytes:
    """A frame from a peer, as the server takes it."""
    server = ZmqServer(listen)
    client = ZmqClient(server.address, b"peer")
    taken: asyncio.Queue[bytes] = asyncio.Queue()
    try:
        server.listen(lambda _route, frame, _user: taken.put_nowait(frame))
        client.listen(lambda _frame: None)
        async with asyncio.timeout(30):
            while not client.send(b"frame"):  # noqa: ASYNC110 - it connects, and calls nobody
                await asyncio.sleep(0.01)
            return await taken.get()
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize("address", ["tcp://[::1]:*", "tcp://127.0.0.1:*", "ipc://{}/bus"])
def test_peers_reach_a_server_at_any_address(address: str, tmp_path: Path) -> None:
    assert asyncio.run(exchange(address.format(tmp_path))) == b"frame"


def test_a_path_that_somebody_listens_at_is_not_taken_over(tmp_path: Path) -> None:
    """The first server goes on. One that was left behind is nobody's."""
    address = f"ipc://{tmp_path}/bus"

    async def test() -> None:
        first = ZmqServer(address)
        with pytest.raises(UsageError, match="is in use: another broker may run there"):
            ZmqServer(address)
        first.close()
        (tmp_path / "bus").touch()
        ZmqServer(address).close()

    asyncio.run(test())
