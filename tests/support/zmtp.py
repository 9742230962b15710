"""A client that speaks ZMTP 3 itself, so that it may send what ZeroMQ's own would not."""

from __future__ import annotations

import socket
import struct
from typing import Final, Self
from urllib.parse import urlsplit

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00"
_GREETING_BYTES: Final = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class RawPeer:
    """One connection. With ``mechanism`` CURVE it stops before the handshake."""

    def __init__(self, address: str, route: bytes = b"raw", mechanism: bytes = b"NULL") -> None:
        where = urlsplit(address)
        assert where.hostname is not None
        assert where.port is not None
        self.socket = socket.create_connection((where.hostname, where.port))
        greeting = _GREETING + mechanism.ljust(20, b"\0")
        self.socket.sendall(greeting.ljust(_GREETING_BYTES, b"\0"))
        self._read(_GREETING_BYTES)
        if mechanism == b"NULL":
            facts = ((b"Socket-Type", b"DEALER"), (b"Identity", route))
            body = [bytes([len(n)]) + n + struct.pack(">I", len(v)) + v for n, v in facts]
            self.socket.sendall(frame(b"\x05READY" + b"".join(body), command=True))
            self._next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        """One message."""
        *head, last = parts
        self.socket.sendall(b"".join(frame(part, more=True) for part in head) + frame(last))

    def receive(self) -> bytes:
        """The body of the next frame; commands, as heartbeats are, are passed over."""
        while True:
            flags, body = self._next()
            if not flags & _COMMAND:
                return body

    def _next(self) -> tuple[int, bytes]:
        (flags,) = self._read(1)
        size = int.from_bytes(self._read(8 if flags & _LONG else 1), "big")
        return flags, self._read(size)

    def pour(self, data: bytes, times: int) -> bool:
        """Send so often; True if the other end has cut the connection."""
        try:
            for _ in range(times):
                self.socket.sendall(data)
            return not self.socket.recv(1)
        except OSError:
            return True

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the other end has closed the connection"
            data += more
        return data


def frame(body: bytes, *, more: bool = False, command: bool = False, size: int = -1) -> bytes:
    """A frame. It says that it has ``size`` bytes, whatever follows."""
    size = len(body) if size < 0 else size
    flags = _MORE * more | _COMMAND * command
    if size < 256:
        return bytes([flags, size]) + body
    return bytes([flags | _LONG]) + size.to_bytes(8, "big") + body
