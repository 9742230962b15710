"""ZeroMQ sockets in an asyncio event loop.

The event loop watches a socket's descriptor and drains the socket in batches, without blocking.
The descriptor is edge-triggered: it reports new events only after all earlier ones were handled. A
send may consume an event, so the socket is checked again after every send.

:class:`MultipartSocket` carries the messages between a DP group's coordinator and its ranks. Its
queues are unbounded, because a START_DP_WAVE that reaches only some cores makes those wait.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import zmq

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    OnParts = Callable[[list[bytes]], None]


_POLLIN: Final = int(zmq.POLLIN)

_EVENTS: Final = int(zmq.EVENTS)


class ZmqSocket(ABC):
    """A ZeroMQ socket that an asyncio event loop reads."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._draining = False  # also True while a drain is scheduled
        self._closed = False
        # Closes the socket with this object if close() was never called. The socket's own
        # finalizer may fail (when warnings are errors), and the process would then wait for the
        # open socket at exit.
        weakref.finalize(self, socket.close).atexit = False

    def watch(self) -> None:
        """Starts to receive in the event loop."""
        self._loop.add_reader(self._descriptor, self.drain)
        self.drain_soon()

    def drain_soon(self) -> None:
        """Schedules a drain if frames are waiting, because the descriptor may not report them.

        During a drain this does nothing, because a drain ends only when no frame is left.
        """
        if not (self._draining or self._closed) and self._has_more():
            self._draining = True
            self._loop.call_soon(self.drain)

    def _has_more(self) -> bool:
        """Returns whether a frame is waiting; cheaper than a receive that fails."""
        return int(self.socket.getsockopt(_EVENTS)) & _POLLIN != 0

    def drain(self) -> None:
        """Receives all waiting frames, without blocking."""
        if self._closed:
            return
        emptied = False
        self._draining = True
        try:
            emptied = self.receive_batch()
        finally:
            self._draining = False
            if not emptied:
                self.drain_soon()

    @abstractmethod
    def receive_batch(self) -> bool:
        """Receives a batch of frames; returns True if no frame is left, else False."""

    def close(self) -> None:
        """Closes the socket; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self.socket.close()


_LINGER_MS: Final = 200

_BATCH: Final = 512

_NOBLOCK: Final = int(zmq.NOBLOCK)


class MultipartSocket(ZmqSocket):
    """A socket for multipart messages, bound or connected to ``address``.

    Args:
        kind: the socket's type, such as ``zmq.PUSH``.
        options: further socket options, set before the socket is bound or connected.
        bind: True: bind the socket. False: connect it.

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
        """Starts to receive; calls ``on_parts`` for every message."""
        self._on_parts = on_parts
        self.watch()

    def receive_batch(self) -> bool:
        """Receives a batch of messages; returns True if none is left, else False."""
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
        """Sends one message, without waiting for a peer."""
        self.socket.send_multipart(parts, _NOBLOCK)
        if self._on_parts is not None:
            self.drain_soon()
