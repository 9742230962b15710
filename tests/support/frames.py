"""A peer made of nothing but its socket: it says whatever a test wants, and hears the answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from bus._runtime.peer import route_of
from bus._runtime.zmq_transport import ZmqClient
from bus.messages import WIRE_NAMES, WIRE_VERSION, Envelope, Message, Nack, codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._keys import Security

LIMIT_S = 60.0


class BarePeer:
    """One connection; frames go out as they are given."""

    def __init__(
        self, address: str, name: str, security: Security | None = None, *, boot: int = 1
    ) -> None:
        self.name = name
        self.boot = boot
        self.seq = 0
        self.epoch = 0
        self.heard: list[tuple[Envelope, Message]] = []
        self._news = asyncio.Event()
        self.socket = ZmqClient(address, route_of(name, boot), security)
        self.socket.listen(self._on_frame)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _on_frame(self, frame: bytes) -> None:
        self.heard.append(codec.decode(frame))
        self._news.set()

    def frame(
        self, message: Message, *, seq: int | None = None, version: int = WIRE_VERSION
    ) -> bytes:
        """The frame of a message, with the next number."""
        self.seq = self.seq + 1 if seq is None else seq
        body = codec.encode_body(message)
        kind = WIRE_NAMES[type(message)]
        return codec.encode(
            Envelope(
                *(version, kind, self.seq, 0, self.name),
                *(self.boot, "policy", self.epoch, self.seq, body),
            )
        )

    async def say(self, frame: bytes) -> None:
        """Send; wait for the connection if there is none yet."""
        async with asyncio.timeout(LIMIT_S):
            while not self.socket.send(frame):  # noqa: ASYNC110 - ZeroMQ calls nobody
                await asyncio.sleep(0.01)

    async def ask(self, message: Message) -> Message:
        """Say it, and return the answer."""
        return await self.answer(self.frame(message))

    async def answer(self, frame: bytes) -> Message:
        """Say a frame, and return what is heard next."""
        count = len(self.heard)
        await self.say(frame)
        await self.until(lambda: len(self.heard) > count)
        envelope, message = self.heard[count]
        self.epoch = max(self.epoch, envelope.epoch)
        return message

    async def refusal(self, frame: bytes) -> Nack:
        """The same, for a frame that is refused."""
        message = await self.answer(frame)
        assert isinstance(message, Nack), message
        return message

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()
