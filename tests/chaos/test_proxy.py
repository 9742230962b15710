"""The proxies of the tests leave no connection open behind them."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tests.support.proxy import BadProxy


@pytest.mark.parametrize("steps", range(12))
def test_a_proxy_that_ends_while_a_connection_ends_closes_both_sides(steps: int) -> None:
    """Whichever step of the connection's end it is in; an open writer that is dropped warns."""

    async def play() -> None:
        arrived = asyncio.Event()

        async def target(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(1)
            arrived.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(target, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            async with BadProxy(f"127.0.0.1:{port}", seed=1, cut_every_s=1e6) as proxy:
                host, _, proxy_port = proxy.address.removeprefix("tcp://").rpartition(":")
                _, writer = await asyncio.open_connection(host, int(proxy_port))
                writer.write(b"x")
                await arrived.wait()
                writer.close()
                for _ in range(steps):
                    await asyncio.sleep(0)
            await writer.wait_closed()
        gc.collect()

    asyncio.run(play())
