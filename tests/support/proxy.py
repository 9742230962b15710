"""A TCP proxy that delays what passes, and cuts connections, at random from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final

from tests.support.relay import Relay

_CHUNK: Final = 65536


class BadProxy(Relay):
    """Between peers and a broker, for the length of an ``async with``.

    Args:
        target: where the broker listens, as ``host:port``.
        seed: of delays and cuts.
        delay_ms: the most that a piece is held up.
        cut_every_s: how long a connection lives on the average.
    """

    def __init__(
        self, target: str, *, seed: int, delay_ms: float = 15.0, cut_every_s: float = 4.0
    ) -> None:
        super().__init__()
        self.cuts = 0
        self.pieces = 0
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._random = random.Random(seed)
        self._delay_ms = delay_ms
        self._cut_every_s = cut_every_s

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        ways: list[asyncio.Task[None]] = []
        try:
            other_reader, other_writer = await asyncio.open_connection(self._host, self._port)
            writers.append(other_writer)
            ways = [
                asyncio.create_task(self._pump(reader, other_writer)),
                asyncio.create_task(self._pump(other_reader, writer)),
            ]
            lives_s = self._random.expovariate(1 / self._cut_every_s)
            done, _ = await asyncio.wait(ways, timeout=lives_s, return_when=asyncio.FIRST_COMPLETED)
            self.cuts += not done
        except OSError:
            pass  # the broker is not there
        finally:
            for way in ways:
                way.cancel()
            for each in writers:
                each.close()  # before the first await: the proxy may end in the middle of this
            await asyncio.gather(*ways, return_exceptions=True)
            for each in writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass pieces on, in order, each after a while."""
        with contextlib.suppress(OSError):
            while piece := await reader.read(_CHUNK):
                self.pieces += 1
                await asyncio.sleep(self._random.random() * self._delay_ms / 1000)
                writer.write(piece)
                await writer.drain()
