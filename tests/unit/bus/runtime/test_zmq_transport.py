"""Addresses that a server listens at, and peers connect to."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from bus._runtime.zmq_transport import ZmqClient, ZmqServer
from bus.errors import UsageError

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


def test_a_path_that_is_too_long_is_wrong_usage() -> None:
    async def test() -> None:
        with pytest.raises(UsageError, match="an address looks like"):
            ZmqServer(f"ipc:///tmp/{'x' * 200}")

    asyncio.run(test())


def test_a_server_may_be_closed_twice_and_leaves_nothing_open() -> None:
    """Whether it has listened or not. A closed descriptor may be somebody else's by then."""

    async def test() -> None:
        ZmqServer("tcp://127.0.0.1:*").close()  # ZeroMQ's own are there from the first on
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - with its own, both times
        for listens in (False, True):
            server = ZmqServer("tcp://127.0.0.1:*")
            if listens:
                server.listen(lambda _route, _frame, _user: None)
            server.close()
            with contextlib.closing(ZmqServer("tcp://127.0.0.1:*")):
                server.close()
        deadline_s = asyncio.get_running_loop().time() + 30
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: PTH208
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.01)  # ZeroMQ closes its own in its own time

    asyncio.run(test())
