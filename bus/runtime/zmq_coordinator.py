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
from bus.runtime.zmq_parts import PartsSocket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    OnParts = Callable[[list[bytes]], None]

_MAX_RECV_BYTES: Final = 1024 * 1024
_BOUNDED: Final[Mapping[int, int]] = {zmq.MAXMSGSIZE: _MAX_RECV_BYTES}
# Verbose: every subscription is told, not the first alone.
_PUBLISHES: Final[Mapping[int, int]] = {**_BOUNDED, zmq.XPUB_VERBOSE: 1}


class CoordinatorSockets:
    """The three sockets, bound on ``host`` and watched by the running loop.

    Raises:
        UsageError: the host is not one of this machine's.
    """

    def __init__(self, host: str) -> None:
        address = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front = PartsSocket(self._context, zmq.XPUB, address, _PUBLISHES, bind=True)
            self._core_in = PartsSocket(self._context, zmq.XPUB, address, _PUBLISHES, bind=True)
            self._core_out = PartsSocket(self._context, zmq.PULL, address, _BOUNDED, bind=True)
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
        self._front.send(frame)

    def to_cores(self, parts: Sequence[bytes]) -> None:
        """Publish to every core."""
        self._core_in.send(*parts)

    def close(self) -> None:
        """End; what was sent is still delivered if it can be."""
        for socket in (self._front, self._core_in, self._core_out):
            socket.close()
        self._context.term()
