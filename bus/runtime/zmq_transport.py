"""ZeroMQ: a ROUTER at the broker, a DEALER at each peer. The only file that knows zmq.

The socket's descriptor sits in the event loop and is drained without blocking, in
batches. That descriptor is edge-triggered: it tells of new events only after all
known ones were taken, and a send may swallow one, so after every send the socket is
looked at again.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import time
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import zmq
import zmq.backend

from bus.errors import UsageError
from bus.messages import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.runtime.base import OnFrame, OnRoutedFrame

MAX_PEERS: Final = 16_384
# A frame somewhat too large is read, so that its sender hears why it is refused; one
# far too large costs its sender the connection.
_MAX_RECV_BYTES: Final = 2 * MAX_FRAME_BYTES
_BATCH: Final = 512
_QUEUE: Final = 10_000
# As plain numbers: the flags' own arithmetic takes as long as a small send.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN: Final = int(zmq.POLLIN)
_EVENTS: Final = int(zmq.EVENTS)
_RCVMORE: Final = int(zmq.RCVMORE)
# Past pyzmq's look at options that we never use, which takes as long as the send itself.
_send: Final = zmq.backend.Socket.send

# What was sent last, such as a LEAVE, may wait so long for a busy machine; without a peer nothing
# waits.
_LINGER_MS: Final = 2_000
_REBIND_S: Final = 1.0
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}  # by process: forks need their own


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's context: ours alone, so that it can be ended when the process ends."""
    context = _contexts.get(os.getpid())
    if context is None:
        context = _contexts[os.getpid()] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_PEERS)
        atexit.register(_flush, os.getpid())
    return context


def _flush(pid: int) -> None:
    """At exit: let go what was sent last, such as a LEAVE; without this it is lost."""
    if pid == os.getpid():
        _contexts.pop(pid).destroy(linger=_LINGER_MS)


def _harden(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_RECV_BYTES)
    socket.setsockopt(zmq.SNDHWM, _QUEUE)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    """Bind; a socket of ours that was closed just now may hold the port a moment longer."""
    deadline_s = time.monotonic() + _REBIND_S
    while True:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                raise
            time.sleep(_REBIND_S / 20)
        else:
            return


class Readable(ABC):
    """A zmq socket in an asyncio loop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._draining = False  # or about to
        self._closed = False
        # One that was forgotten is closed with us. Left to the socket's own end it may stay
        # open for good (warnings made errors break that end off), and then the process waits
        # for it when it exits.
        weakref.finalize(self, socket.close).atexit = False

    def watch(self) -> None:
        self._loop.add_reader(self._descriptor, self.drain)
        self.look_again()

    def look_again(self) -> None:
        """Drain soon if events are there: the descriptor may not tell of them.

        While draining this needs nothing: a drain ends only when nothing is left.
        """
        if not (self._draining or self._closed) and self._more():
            self._draining = True
            self._loop.call_soon(self.drain)

    def _more(self) -> bool:
        """Whether a frame is there; cheaper than an attempt that fails."""
        return int(self.socket.getsockopt(_EVENTS)) & _POLLIN != 0

    def drain(self) -> None:
        """Take what is there, without blocking."""
        if self._closed:
            return
        emptied = False
        self._draining = True
        try:
            emptied = self.take()
        finally:
            self._draining = False
            if not emptied:
                self.look_again()

    @abstractmethod
    def take(self) -> bool:
        """Take a batch; True if then nothing was left."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self.socket.close()


class ZmqServer(Readable):
    """The broker's ROUTER, bound to ``address`` (``tcp://127.0.0.1:7710``; port ``*`` or 0:
    any free one, see :attr:`address`).

    Raises:
        UsageError: the address is malformed, or in use.
    """

    def __init__(self, address: str) -> None:
        socket = _context().socket(zmq.ROUTER)
        _harden(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.BACKLOG, 4096)
        try:
            _bind(socket, address)
        except zmq.ZMQError as error:
            socket.close()
            raise UsageError(_explain(address, error)) from error
        super().__init__(socket)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
        self._on_frame: OnRoutedFrame | None = None

    def listen(self, on_frame: OnRoutedFrame) -> None:
        self._on_frame = on_frame
        self.watch()

    def take(self) -> bool:
        assert self._on_frame is not None
        recv, on_frame, socket = self.socket.recv, self._on_frame, self.socket
        for _ in range(_BATCH):
            try:
                route = recv(_NOBLOCK)
            except zmq.Again:
                return True
            frame = recv(_NOBLOCK)  # a route never comes alone
            while socket.getsockopt(_RCVMORE):  # not ours: more parts than a frame has
                recv(_NOBLOCK)
                frame = b""
            on_frame(route, frame)
            if self._closed:
                return True
        return False

    def send(self, routes: Iterable[bytes], frame: bytes) -> list[bytes]:
        socket = self.socket
        unreachable: list[bytes] = []
        for route in routes:
            try:
                _send(socket, route, _NOBLOCK_MORE)
                _send(socket, frame, _NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                    raise
                unreachable.append(route)
        self.look_again()
        return unreachable


class ZmqClient(Readable):
    """A peer's DEALER, connected to the broker at ``address``.

    ``route`` must be unique among all peers and all lives of them.

    Raises:
        UsageError: the address is malformed.
    """

    def __init__(self, address: str, route: bytes) -> None:
        socket = _context().socket(zmq.DEALER)
        _harden(socket)
        socket.setsockopt(zmq.ROUTING_ID, route)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # don't queue for a broker that isn't there
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # Half-open connections end by themselves, below the bus's own heartbeats: the
        # client asks, and by the TTL in its question the broker knows when to let go.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 15_000)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise UsageError(_explain(address, error)) from error
        super().__init__(socket)
        self._on_frame: OnFrame | None = None

    def listen(self, on_frame: OnFrame) -> None:
        self._on_frame = on_frame
        self.watch()

    def take(self) -> bool:
        assert self._on_frame is not None
        recv, on_frame = self.socket.recv, self._on_frame
        for _ in range(_BATCH):
            try:
                frame = recv(_NOBLOCK)
            except zmq.Again:
                return True
            on_frame(frame)  # the broker sends frames of one part; others are judged part by part
            if self._closed or not self._more():
                return True
        return False

    def send(self, frame: bytes) -> bool:
        try:
            _send(self.socket, frame, _NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self.look_again()
        return True


def _explain(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{address} is in use: another broker may run there (`wavebus status --broker "
            f"{address}`); choose another port"
        )
    return f"{address}: {error.strerror}; an address looks like tcp://127.0.0.1:7710"


def library_version() -> str:
    """The version of the ZeroMQ library itself."""
    return zmq.zmq_version()
