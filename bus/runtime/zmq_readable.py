"""A ZeroMQ socket in an event loop.

The socket's descriptor sits in the event loop and is drained without blocking, in
batches. That descriptor is edge-triggered: it tells of new events only after all
known ones were taken, and a send may swallow one, so after every send the socket is
looked at again.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from typing import Final

import zmq

_POLLIN: Final = int(zmq.POLLIN)
_EVENTS: Final = int(zmq.EVENTS)


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
