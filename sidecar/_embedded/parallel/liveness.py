"""Connects the ranks of a DP group, so that all notice a lost rank, also while idle.

Rank 0 listens and the others connect. Each connection ends with its process, however that ends, and
rank 0 reports a lost rank to the others. A rank that closes in order announces that first. The
other ranks are then probably closing, too, so they wait a moment before they report that it is
gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from bus.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

# How long the others wait after a rank has left: they may be leaving, too.
LEAVE_GRACE_S: Final = 3.0
_GONE: Final = "gone"
_LEAVING: Final = "leaving"
_MAX_LINE_BYTES: Final = 64


class RankLiveness:
    """Connects a rank of a DP group to the other ranks, and reports a lost rank.

    The ranks send lines ``<rank> <what>``: first ``<rank> here``; later ``leaving`` or ``gone``,
    also about other ranks.

    Args:
        lost: called once, with the reason, when another rank is gone; 3 s later if that rank has
            announced that it leaves.

    Attributes:
        noticed: set as soon as another rank is known to be gone, before ``lost`` is called.
        all_here: set, in rank 0, when all other ranks have connected.
    """

    def __init__(self, group: str, rank: int, size: int, lost: Callable[[str], None]) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: set[int] = set()
        self._closing = False
        self._said = False
        self.noticed = asyncio.Event()
        self.all_here = asyncio.Event()

    async def listen(self, host: str) -> tuple[str, int]:
        """Begins to listen, as rank 0; returns the address to which the others connect."""
        self._server = await asyncio.start_server(self._welcome, host, 0, limit=_MAX_LINE_BYTES)
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    async def connect(self, host: str, port: int) -> None:
        """Connects this rank, which is not rank 0, to rank 0.

        Raises:
            EngineError: rank 0 does not listen.
        """
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
        except OSError as error:
            raise EngineError(f"rank 0 of DP group {self._group} is gone: {error}") from error
        self._writers[0] = writer
        self._say(writer, self._rank, "here")
        self._watch(0, reader)

    def leave(self) -> None:
        """Announces that this rank closes, and stops watching the others."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            self._say(writer, self._rank, _LEAVING)

    def announce_crash(self) -> None:
        """Announces that this rank's core has crashed, though its process lives."""
        for writer in self._writers.values():
            self._say(writer, self._rank, _GONE)

    async def close(self) -> None:
        """Leaves, and closes all connections."""
        self.leave()
        for writer in self._writers.values():
            writer.close()  # before the first await, which may be cancelled
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if self._server is not None:
            self._server.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            rank, _ = _parsed(await reader.readline())
            if 0 < rank < self._size and rank not in self._writers and not self._closing:
                self._writers[rank] = writer
                self._watch(rank, reader)
                if len(self._writers) == self._size - 1:
                    self.all_here.set()
                return
        writer.close()  # not one of the ranks

    def _watch(self, rank: int, reader: asyncio.StreamReader) -> None:
        task = asyncio.create_task(self._read(rank, reader))
        self._tasks.add(task)

    async def _read(self, peer: int, reader: asyncio.StreamReader) -> None:
        """Reads what ``peer`` announces, until the connection ends."""
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                rank, what = _parsed(line)
                self._left.update({rank} if what == _LEAVING else ())
                if what == _GONE:
                    await self._declare(rank)
        await self._declare(peer)

    async def _declare(self, rank: int) -> None:
        what = _LEAVING if rank in self._left else _GONE
        self.noticed.set()
        for other, writer in self._writers.items():
            if self._rank == 0 and other != rank:
                self._say(writer, rank, what)
                self._say(writer, rank, _GONE)
        if what == _LEAVING:
            await asyncio.sleep(LEAVE_GRACE_S)
        if not self._said:
            self._said = True
            word = "has left" if what == _LEAVING else "has died"
            self._lost(
                f"rank {rank} of DP group {self._group} {word}, and rank {self._rank} can't "
                "step without it"
            )

    def _say(self, writer: asyncio.StreamWriter, rank: int, what: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            writer.write(f"{rank} {what}\n".encode())


def _parsed(line: bytes) -> tuple[int, str]:
    """Returns a line's rank and announcement; raises ValueError for any other line."""
    rank, _, what = line.decode("ascii").strip().partition(" ")
    return int(rank), what
