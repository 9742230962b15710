"""Addresses that a server listens at, and peers connect to."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

import pytest

import bus.log
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


async def taken_by(server: ZmqServer, client: ZmqClient, frame: bytes) -> None:
    """Send frames, as heartbeats would be, until the server has taken one."""
    taken = asyncio.Event()
    server.listen(lambda _route, got, _user: taken.set() if got == frame else None)
    async with asyncio.timeout(60):
        while not taken.is_set():
            client.send(frame)
            await asyncio.wait([asyncio.ensure_future(taken.wait())], timeout=0.1)


def test_a_peer_follows_a_server_that_moves_among_its_addresses() -> None:
    """To and fro; whichever address it has been given first."""

    async def test() -> None:
        with contextlib.closing(ZmqServer("tcp://127.0.0.1:*")) as server:
            first = server.address
        with contextlib.closing(ZmqServer("tcp://127.0.0.1:*")) as second:
            client = ZmqClient(f"{first}, {second.address}", b"peer")
            client.listen(lambda _frame: None)
            await taken_by(second, client, b"one")
            assert client.address == second.address
        with contextlib.closing(ZmqServer(first)) as again:
            await taken_by(again, client, b"two")
        with contextlib.closing(ZmqServer(second.address)) as third:
            await taken_by(third, client, b"three")
        client.close()

    asyncio.run(test())


def test_a_peer_asks_where_the_server_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Again as long as the lookup fails, knows none, or names an address that nobody may use."""
    bus.log.configure(level="warning", json=True)
    answers: list[str | Exception] = [ValueError("x"), "", "tcp://10.0.0.1:1", "nonsense"]

    async def test() -> None:
        with contextlib.closing(ZmqServer("tcp://127.0.0.1:*")) as server:
            asked: list[str | Exception] = []

            def find() -> str:
                asked.append(answers[len(asked)] if len(asked) < len(answers) else server.address)
                if isinstance(asked[-1], Exception):
                    raise asked[-1]
                return asked[-1]

            client = ZmqClient(find, b"peer")
            client.listen(lambda _frame: None)
            assert client.address == ""
            await taken_by(server, client, b"one")
            assert asked == [*answers, server.address]
            client.close()

    asyncio.run(test())
    said = [line for line in capsys.readouterr().err.splitlines() if "broker_not_found" in line]
    assert len(said) == len([each for each in answers if each])


@pytest.mark.parametrize("broker", ["", "tcp://127.0.0.1:1,", "tcp://127.0.0.1:1,x"])
def test_each_address_of_a_list_must_be_one(broker: str) -> None:
    async def test() -> None:
        with pytest.raises(UsageError, match="an address looks like"):
            ZmqClient(broker, b"peer")

    asyncio.run(test())
