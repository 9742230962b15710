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

from typing import TYPE_CHECKING

import zmq

from bus.errors import UsageError
from bus.runtime.zmq_parts import PartsSocket

if TYPE_CHECKING:
    from collections.abc import Callable

    OnParts = Callable[[list[bytes]], None]


class MemberSockets:
    """One rank's sockets, watched by the running loop.

    Raises:
        UsageError: an address is none.
    """

    def __init__(self, rank: int, *, front: str, core_in: str, core_out: str) -> None:
        identity: dict[int, bytes] = {zmq.IDENTITY: rank.to_bytes(2, "little")}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front = PartsSocket(self._context, zmq.XSUB, front, identity, bind=False)
            self._core_in = PartsSocket(self._context, zmq.XSUB, core_in, identity, bind=False)
            self._core_out = PartsSocket(self._context, zmq.PUSH, core_out, identity, bind=False)
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
