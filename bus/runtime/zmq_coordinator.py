"""The three sockets of a DP group's coordinator, as vLLM's front ends and cores expect them.

============ ==== ================= ==================================================
name         type connects          what goes over it
============ ==== ================= ==================================================
``front``    XPUB every front end   publications; back: subscriptions, FIRST_REQ
``core_in``  XPUB every engine core READY and START_DP_WAVE; back: subscriptions
``core_out`` PULL every engine core reports
============ ==== ================= ==================================================

All three are bound here, to ports that the system chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq

from bus.errors import UsageError
from bus.runtime.zmq_transport import Readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    OnParts = Callable[[list[bytes]], None]

_LINGER_MS: Final = 200
_MAX_RECV_BYTES: Final = 1024 * 1024
_BATCH: Final = 512
_NOBLOCK: Final = int(zmq.NOBLOCK)


class _Socket(Readable):
    """One of the three, which hands over each message as its parts."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> None:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_RECV_BYTES)
        # Nothing is dropped for a peer that is slow: a START that reaches only some cores
        # makes those wait for the others.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription, not the first alone
        if "[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise UsageError(f"{address}: {error.strerror}") from error
        super().__init__(socket)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
        self._on_parts: OnParts | None = None

    def listen(self, on_parts: OnParts) -> None:
        self._on_parts = on_parts
        self.watch()

    def take(self) -> bool:
        assert self._on_parts is not None
        for _ in range(_BATCH):
            try:
                parts = self.socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return True
            self._on_parts(parts)
            if self.socket.closed:
                return True
        return False

    def send(self, parts: Sequence[bytes]) -> None:
        self.socket.send_multipart(parts, _NOBLOCK)
        self.look_again()


class CoordinatorSockets:
    """The three sockets, bound on ``host`` and watched by the running loop.

    Raises:
        UsageError: the host is not one of this machine's.
    """

    def __init__(self, host: str) -> None:
        address = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front = _Socket(self._context, zmq.XPUB, address)
            self._core_in = _Socket(self._context, zmq.XPUB, address)
            self._core_out = _Socket(self._context, zmq.PULL, address)
        except UsageError:
            self._context.destroy(linger=0)
            raise
        self.front = self._front.address
        self.core_in = self._core_in.address
        self.core_out = self._core_out.address

    def listen(
        self, *, on_front: OnParts, on_core_subscription: OnParts, on_core_report: OnParts
    ) -> None:
        """Begin; each is called with the parts of every message."""
        self._core_in.listen(on_core_subscription)
        self._front.listen(on_front)
        self._core_out.listen(on_core_report)

    def to_fronts(self, frame: bytes) -> None:
        """Publish to every front end."""
        self._front.send((frame,))

    def to_cores(self, parts: Sequence[bytes]) -> None:
        """Publish to every core."""
        self._core_in.send(parts)

    def close(self) -> None:
        """End; what was sent is still delivered if it can be."""
        for socket in (self._front, self._core_in, self._core_out):
            socket.close()
        self._context.term()
