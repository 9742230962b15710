"""A rank's side of the three sockets of :mod:`bus.runtime.zmq_coordinator`.

============ ==== =================================================
name         type what goes over it
============ ==== =================================================
``front``    XSUB the front end hears publications, says FIRST_REQ
``core_in``  XSUB the core hears READY and START_DP_WAVE
``core_out`` PUSH the core reports
============ ==== =================================================

Front end and core are one process here, so one loop has all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq

from bus.errors import UsageError
from bus.runtime.zmq_transport import Readable

if TYPE_CHECKING:
    from collections.abc import Callable

    OnParts = Callable[[list[bytes]], None]

_LINGER_MS: Final = 200
_BATCH: Final = 512
_NOBLOCK: Final = int(zmq.NOBLOCK)


class _Socket(Readable):
    """One of them, connected to ``address``; it may be said something at once."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, identity: bytes
    ) -> None:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if "[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise UsageError(f"{address}: {error.strerror}") from error
        super().__init__(socket)
        self._on_parts: OnParts | None = None

    def listen(self, on_parts: OnParts) -> None:
        self._on_parts = on_parts
        self.watch()

    def take(self) -> bool:
        for _ in range(_BATCH):
            try:
                parts = self.socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return True
            if self._on_parts is not None:
                self._on_parts(parts)
            if self.socket.closed:
                return True
        return False

    def send(self, frame: bytes) -> None:
        self.socket.send(frame, _NOBLOCK)
        if self._on_parts is not None:
            self.look_again()


class MemberSockets:
    """One rank's sockets, watched by the running loop.

    Raises:
        UsageError: an address is none.
    """

    def __init__(self, rank: int, *, front: str, core_in: str, core_out: str) -> None:
        identity = rank.to_bytes(2, "little")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front = _Socket(self._context, zmq.XSUB, front, identity)
            self._core_in = _Socket(self._context, zmq.XSUB, core_in, identity)
            self._core_out = _Socket(self._context, zmq.PUSH, core_out, identity)
        except UsageError:
            self._context.destroy(linger=0)
            raise

    def listen(self, *, on_front: OnParts, on_core: OnParts) -> None:
        """Begin; each is called with the parts of every message."""
        self._front.listen(on_front)
        self._core_in.listen(on_core)

    def from_front(self, frame: bytes) -> None:
        """Say this as the front end."""
        self._front.send(frame)

    def subscribe_core(self, frame: bytes) -> None:
        """Say this where the core listens."""
        self._core_in.send(frame)

    def from_core(self, frame: bytes) -> None:
        """Report this as the core."""
        self._core_out.send(frame)

    def close(self) -> None:
        """End; what was sent is still delivered if it can be."""
        for socket in (self._front, self._core_in, self._core_out):
            socket.close()
        self._context.term()
