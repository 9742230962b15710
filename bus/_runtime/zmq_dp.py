"""The three sockets between a DP group's coordinator and vLLM's front ends and engine cores.

============ =========== ========= ===================================================
name         coordinator rank      carries
============ =========== ========= ===================================================
``front``    XPUB        XSUB      publications to every front end; back: subscriptions, FIRST_REQ
``core_in``  XPUB        XSUB      READY and START_DP_WAVE to every core; back: subscriptions
``core_out`` PULL        PUSH      reports of every core
============ =========== ========= ===================================================

The coordinator binds all three, to ports that the system chooses. A rank whose front end and core
share a process connects to all three from one event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq

from bus._runtime.zmq_socket import MultipartSocket
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    OnParts = Callable[[list[bytes]], None]


_MAX_RECV_BYTES: Final = 1024 * 1024

_BOUNDED: Final[Mapping[int, int]] = {zmq.MAXMSGSIZE: _MAX_RECV_BYTES}

# Verbose: the coordinator receives every subscription, not only the first.
_PUBLISHES: Final[Mapping[int, int]] = {**_BOUNDED, zmq.XPUB_VERBOSE: 1}


class _DpSockets:
    """The three sockets of one process, in the running event loop."""

    def __init__(
        self,
        kinds: Sequence[int],
        addresses: Sequence[str],
        options: Sequence[Mapping[int, int | bytes]],
        *,
        bind: bool,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front, self._core_in, self._core_out = (
                MultipartSocket(self._context, kind, address, option, bind=bind)
                for kind, address, option in zip(kinds, addresses, options, strict=True)
            )
        except UsageError:
            self._context.destroy(linger=0)
            raise

    def close(self) -> None:
        """Closes the sockets; messages already sent are still delivered if possible."""
        for socket in (self._front, self._core_in, self._core_out):
            socket.close()
        self._context.term()


class DpCoordinatorSockets(_DpSockets):
    """Binds the three sockets of the DP coordinator on ``host``.

    Attributes:
        front: the address of the socket for front ends.
        core_in: the address where cores listen.
        core_out: the address where cores report.

    Raises:
        UsageError: the host is no address of this machine.
    """

    def __init__(self, host: str) -> None:
        address = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        kinds, options = (zmq.XPUB, zmq.XPUB, zmq.PULL), (_PUBLISHES, _PUBLISHES, _BOUNDED)
        super().__init__(kinds, [address] * 3, options, bind=True)
        self.front = self._front.address
        self.core_in = self._core_in.address
        self.core_out = self._core_out.address

    def listen(
        self, *, on_front: OnParts, on_core_subscription: OnParts, on_core_report: OnParts
    ) -> None:
        """Starts to receive; each handler is called with the parts of every message.

        Args:
            on_front: gets the front ends' subscriptions and FIRST_REQ.
            on_core_subscription: gets the cores' subscriptions.
            on_core_report: gets the cores' reports.
        """
        self._core_in.listen(on_core_subscription)
        self._front.listen(on_front)
        self._core_out.listen(on_core_report)

    def publish_to_fronts(self, frame: bytes) -> None:
        """Publishes a frame to every front end."""
        self._front.send(frame)

    def publish_to_cores(self, parts: Sequence[bytes]) -> None:
        """Publishes a message to every core."""
        self._core_in.send(*parts)


class DpRankSockets(_DpSockets):
    """Connects the sockets of one rank to those of the DP coordinator.

    Args:
        rank: the rank's number, which becomes the ZeroMQ identity of its sockets.
        front: the address of the coordinator's socket for front ends.
        core_in: the address where cores listen.
        core_out: the address where cores report.

    Raises:
        UsageError: an address is malformed.
    """

    def __init__(self, rank: int, *, front: str, core_in: str, core_out: str) -> None:
        identity: dict[int, int | bytes] = {zmq.IDENTITY: rank.to_bytes(2, "little")}
        kinds = (zmq.XSUB, zmq.XSUB, zmq.PUSH)
        super().__init__(kinds, (front, core_in, core_out), [identity] * 3, bind=False)

    def listen(self, *, on_front: OnParts, on_core: OnParts) -> None:
        """Starts to receive; each handler is called with the parts of every message.

        Args:
            on_front: gets the messages to front ends.
            on_core: gets the messages to cores.
        """
        self._front.listen(on_front)
        self._core_in.listen(on_core)

    def send_as_front(self, frame: bytes) -> None:
        """Sends a frame to the coordinator, as a front end does."""
        self._front.send(frame)

    def subscribe_as_core(self, frame: bytes) -> None:
        """Subscribes to the coordinator's messages to cores, as a core does."""
        self._core_in.send(frame)

    def report_as_core(self, frame: bytes) -> None:
        """Sends a report to the coordinator, as a core does."""
        self._core_out.send(frame)
