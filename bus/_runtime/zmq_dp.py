"""Opens the three sockets between a DP coordinator and vLLM's front ends and engine cores.

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

from typing import TYPE_CHECKING, Final, Self

import zmq

from bus._runtime.zmq_socket import MultipartSocket
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAX_RECV_BYTES: Final = 1024 * 1024

_BOUNDED: Final[Mapping[int, int]] = {zmq.MAXMSGSIZE: _MAX_RECV_BYTES}

# Verbose: the coordinator receives every subscription, not only the first.
_PUBLISHES: Final[Mapping[int, int]] = {**_BOUNDED, zmq.XPUB_VERBOSE: 1}


class DpSockets:
    """The three DP sockets of a coordinator or a rank, in the running event loop.

    Attributes:
        front: the socket between coordinator and front ends.
        core_in: the socket to the cores.
        core_out: the socket from the cores.
    """

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
            self.front, self.core_in, self.core_out = (
                MultipartSocket(self._context, kind, address, option, bind=bind)
                for kind, address, option in zip(kinds, addresses, options, strict=True)
            )
        except UsageError:
            self._context.destroy(linger=0)
            raise

    @classmethod
    def of_coordinator(cls, host: str) -> Self:
        """Binds the three sockets of the DP coordinator on ``host``.

        Raises:
            UsageError: the host is no address of this machine.
        """
        address = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        kinds, options = (zmq.XPUB, zmq.XPUB, zmq.PULL), (_PUBLISHES, _PUBLISHES, _BOUNDED)
        return cls(kinds, [address] * 3, options, bind=True)

    @classmethod
    def of_rank(cls, rank: int, *, front: str, core_in: str, core_out: str) -> Self:
        """Connects the sockets of one rank to those of the DP coordinator.

        Args:
            rank: the rank's number, which becomes the ZeroMQ identity of its sockets.
            front: the address of the coordinator's socket for front ends.
            core_in: the address where cores listen.
            core_out: the address where cores report.

        Raises:
            UsageError: an address is malformed.
        """
        identity: dict[int, int | bytes] = {zmq.IDENTITY: rank.to_bytes(2, "little")}
        kinds = (zmq.XSUB, zmq.XSUB, zmq.PUSH)
        return cls(kinds, (front, core_in, core_out), [identity] * 3, bind=False)

    @property
    def addresses(self) -> dict[str, str]:
        """The sockets' addresses, by name."""
        return {
            "front": self.front.address,
            "core_in": self.core_in.address,
            "core_out": self.core_out.address,
        }

    def close(self) -> None:
        """Closes the sockets; messages already sent are still delivered if possible."""
        for socket in (self.front, self.core_in, self.core_out):
            socket.close()
        self._context.term()
