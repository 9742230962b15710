"""Sockets of messages in parts, as the two ends of a DP group's coordination have them.

What they share is here: no bound on their queues, since a START that reaches only some
cores makes those wait for the others; and how the loop takes what comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq

from bus.errors import UsageError
from bus.runtime.zmq_readable import Readable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    OnParts = Callable[[list[bytes]], None]

_LINGER_MS: Final = 200
_BATCH: Final = 512
_NOBLOCK: Final = int(zmq.NOBLOCK)


class PartsSocket(Readable):
    """One socket, bound or connected to ``address``. One that nobody listens to only sends.

    Args:
        options: set before that, beside what all of these have.

    Raises:
        UsageError: the address can't be used.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        address: str,
        options: Mapping[int, int | bytes],
        *,
        bind: bool,
    ) -> None:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        for option, value in options.items():
            socket.setsockopt(option, value)
        if "[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            (socket.bind if bind else socket.connect)(address)
        except zmq.ZMQError as error:
            socket.close()
            raise UsageError(f"{address}: {error.strerror}") from error
        super().__init__(socket)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
        self._on_parts: OnParts | None = None

    def listen(self, on_parts: OnParts) -> None:
        """Hand over each message from now on."""
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

    def send(self, *parts: bytes) -> None:
        """Send one message; it waits for no peer."""
        self.socket.send_multipart(parts, _NOBLOCK)
        if self._on_parts is not None:
            self.look_again()
