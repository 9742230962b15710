"""The three sockets between a DP group's coordinator, and vLLM's front ends and engine cores.

============ =========== ========= ===================================================
name         coordinator rank      what goes over it
============ =========== ========= ===================================================
``front``    XPUB        XSUB      publications to every front end; back: subscriptions, FIRST_REQ
``core_in``  XPUB        XSUB      READY and START_DP_WAVE to every core; back: subscriptions
``core_out`` PULL        PUSH      reports of every core
============ =========== ========= ===================================================

The coordinator binds all three, to ports that the system chooses. A rank that is front end and
core in one process connects to all three from one event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq

from bus.errors import UsageError
from bus.runtime.zmq_socket import MultipartSocket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    OnParts = Callable[[list[bytes]], None]


_MAX_RECV_BYTES: Final = 1024 * 1024

_BOUNDED: Final[Mapping[int, int]] = {zmq.MAXMSGSIZE: _MAX_RECV_BYTES}

# Verbose: every subscription is told, not the first alone.
_PUBLISHES: Final[Mapping[int, int]] = {**_BOUNDED, zmq.XPUB_VERBOSE: 1}


class DpCoordinatorSockets:
    """The three sockets, bound on ``host`` and watched by the running loop.

    Raises:
        UsageError: the host is not one of this machine's.
    """

    def __init__(self, host: str) -> None:
        address = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front = MultipartSocket(self._context, zmq.XPUB, address, _PUBLISHES, bind=True)
            self._core_in = MultipartSocket(self._context, zmq.XPUB, address, _PUBLISHES, bind=True)
            self._core_out = MultipartSocket(self._context, zmq.PULL, address, _BOUNDED, bind=True)
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

    def publish_to_fronts(self, frame: bytes) -> None:
        """Publish to every front end."""
        self._front.send(frame)

    def publish_to_cores(self, parts: Sequence[bytes]) -> None:
        """Publish to every core."""
        self._core_in.send(*parts)

    def close(self) -> None:
        """End; what was sent is still delivered if it can be."""
        for socket in (self._front, self._core_in, self._core_out):
            socket.close()
        self._context.term()


class DpRankSockets:
    """One rank's sockets, watched by the running loop.

    Raises:
        UsageError: an address is none.
    """

    def __init__(self, rank: int, *, front: str, core_in: str, core_out: str) -> None:
        identity: dict[int, bytes] = {zmq.IDENTITY: rank.to_bytes(2, "little")}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front = MultipartSocket(self._context, zmq.XSUB, front, identity, bind=False)
            self._core_in = MultipartSocket(self._context, zmq.XSUB, core_in, identity, bind=False)
            self._core_out = MultipartSocket(
                self._context, zmq.PUSH, core_out, identity, bind=False
            )
        except UsageError:
            self._context.destroy(linger=0)
            raise

    def listen(self, *, on_front: OnParts, on_core: OnParts) -> None:
        """Begin; each is called with the parts of every message."""
        self._front.listen(on_front)
        self._core_in.listen(on_core)

    def send_as_front(self, frame: bytes) -> None:
        """Say this as the front end."""
        self._front.send(frame)

    def subscribe_as_core(self, frame: bytes) -> None:
        """Say this where the core listens."""
        self._core_in.send(frame)

    def report_as_core(self, frame: bytes) -> None:
        """Report this as the core."""
        self._core_out.send(frame)

    def close(self) -> None:
        """End; what was sent is still delivered if it can be."""
        for socket in (self._front, self._core_in, self._core_out):
            socket.close()
        self._context.term()
