"""A proxy between peers and a broker that reads what passes, and breaks links on command.

It knows where one frame of ZMTP ends and the next begins, so it swallows whole ones, and knows
whose a connection is by the identity that the peer tells. A test sets a :class:`Trap` for a
message: it is held on its way, and with it all that comes behind it on its connection, until
the test lets go. So what a test does in between happens at that very point of the protocol.
Connections without CURVE alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from bus.errors import DecodeError
from bus.messages import codec
from tests.support.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Envelope, Message

# To the broker, or from it.
Way: TypeAlias = Literal["to", "from"]
WAYS: Final[tuple[Way, Way]] = ("to", "from")

_GREETING: Final = 64
_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_IDENTITY: Final = b"\x08Identity"


@dataclass(frozen=True, slots=True)
class Passing:
    """A message on its way: over whose link, in which direction."""

    peer: str
    way: Way
    envelope: Envelope
    message: Message


class Trap:
    """Waits for one message. ``caught`` is set once it is held; :meth:`release` lets it go on,
    unless its link is broken by then; with :meth:`lose` it ends with its connection."""

    def __init__(self, matches: Callable[[Passing], bool]) -> None:
        self.caught = asyncio.Event()
        self.passing: Passing | None = None
        self._matches = matches
        self._released = asyncio.Event()
        self._lost = False

    def wants(self, passing: Passing) -> bool:
        """Whether this is it; no other is, later."""
        if self.passing is not None or self._released.is_set() or not self._matches(passing):
            return False
        self.passing = passing
        return True

    async def hold(self) -> bool:
        """Whether it goes on."""
        self.caught.set()
        await self._released.wait()
        return not self._lost

    def release(self) -> None:
        self._released.set()

    def lose(self) -> None:
        self._lost = True
        self._released.set()


@dataclass(eq=False)
class _Connection:
    """One peer's, and the proxy's own to the broker on its behalf."""

    writers: list[asyncio.StreamWriter]
    peer: str = ""
    ways: list[asyncio.Task[None]] = field(default_factory=list)
    partial: bool = False  # it has begun while a way was broken, and has no greeting

    def end(self) -> None:
        for way in self.ways:
            way.cancel()
        for writer in self.writers:
            writer.close()


class Links(Relay):
    """All links of a bus, for the length of an ``async with``.

    Args:
        target: the broker's port on loopback.
        observe: is shown every message that arrives here, before anything is done with it.
    """

    def __init__(self, target: int, observe: Callable[[Passing], None]) -> None:
        super().__init__()
        self._target = target
        self._observe = observe
        self._trap: Trap | None = None
        self._broken: dict[str, frozenset[Way]] = {}
        self._everybody: frozenset[Way] = frozenset()
        self._connections: set[_Connection] = set()

    def trap(self, matches: Callable[[Passing], bool]) -> Trap:
        """Hold the next message like this. One trap at a time."""
        if self._trap is not None:
            self._trap.release()
        self._trap = Trap(matches)
        return self._trap

    def cut(self, peer: str = "") -> None:
        """Drop a peer's connection (without a name: everybody's), and refuse new ones."""
        self._break(peer, frozenset(WAYS))
        for connection in self._of(peer):
            connection.end()

    def swallow(self, way: Way, peer: str = "") -> None:
        """Let nothing pass in one direction any more, while connections stand."""
        self._break(peer, frozenset({way}))

    def heal(self) -> None:
        """All links are whole. Who connected meanwhile connects again."""
        self._broken.clear()
        self._everybody = frozenset()
        for connection in list(self._connections):
            if connection.partial:
                connection.end()

    def _break(self, peer: str, ways: frozenset[Way]) -> None:
        if peer:
            self._broken[peer] = ways
        else:
            self._everybody = ways

    def _of(self, peer: str) -> list[_Connection]:
        return [each for each in self._connections if not peer or each.peer == peer]

    def _ways_broken(self, connection: _Connection) -> frozenset[Way]:
        return self._everybody | self._broken.get(connection.peer, frozenset())

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection([writer])
        self._connections.add(connection)
        try:
            far_reader, far = await asyncio.open_connection("127.0.0.1", self._target)
            connection.writers.append(far)
            connection.ways = [
                asyncio.create_task(self._pump(connection, "to", reader, far)),
                asyncio.create_task(self._pump(connection, "from", far_reader, writer)),
            ]
            await asyncio.wait(connection.ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the broker is not there
        finally:
            self._connections.discard(connection)
            connection.end()
            await asyncio.gather(*connection.ways, return_exceptions=True)
            for each in connection.writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _pump(
        self,
        connection: _Connection,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            left = _GREETING  # it comes in pieces: each end waits for the other's before its next
            while left and (piece := await reader.read(left)):
                left -= len(piece)
                await self._pass_on(connection, way, piece, writer)
            while True:
                head = await reader.readexactly(1)
                size = await reader.readexactly(8 if head[0] & _LONG else 1)
                body = await reader.readexactly(int.from_bytes(size, "big"))
                if head[0] & _COMMAND:
                    self._meet(connection, way, body)
                elif not head[0] & _MORE and not await self._message(connection, way, body):
                    return
                await self._pass_on(connection, way, head + size + body, writer)

    async def _pass_on(
        self, connection: _Connection, way: Way, raw: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if way in self._ways_broken(connection):
            connection.partial |= not connection.peer
            return
        writer.write(raw)
        await writer.drain()

    def _meet(self, connection: _Connection, way: Way, command: bytes) -> None:
        """Whose connection it is stands in its first command."""
        at = command.find(_IDENTITY)
        if way != "to" or connection.peer or at < 0:
            return
        begin = at + len(_IDENTITY) + 4
        length = int.from_bytes(command[begin - 4 : begin], "big")
        connection.peer = command[begin : begin + length].decode().partition("#")[0]
        broken = self._ways_broken(connection)
        if broken == frozenset(WAYS):
            connection.end()
        elif broken:
            connection.partial = True

    async def _message(self, connection: _Connection, way: Way, body: bytes) -> bool:
        """Whether it goes on."""
        try:
            envelope, message = codec.decode(body)
        except DecodeError:
            return True
        passing = Passing(connection.peer, way, envelope, message)
        self._observe(passing)
        if self._trap is not None and self._trap.wants(passing):
            return await self._trap.hold()
        return True
