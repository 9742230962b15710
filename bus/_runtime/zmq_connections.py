"""Cuts connections that fill this process's memory with messages that never end.

ZeroMQ bounds the size of a frame, but not of a message: it keeps a message's frames in memory until
the last one arrives. Frames of a handshake may be as large as others. No option of ZeroMQ bounds
the sum, and no call returns it. But the kernel counts the bytes that ZeroMQ has read from a
connection, and ZeroMQ frees the memory of a connection that is shut down.

While the process's memory is :data:`_GROWTH_BYTES` above normal, the guard watches the connections
of one port. It cuts a connection that sends more than :data:`_SMALL_BYTES` and completes no
message. After :data:`_CHECKS` checks, it also cuts a connection that had sent that much when the
watch began, and has completed no message since. Once all remaining connections have completed a
message, as peers do with each heartbeat, none holds the memory: its size then counts as normal. A
peer that is cut during a long message reconnects and repeats the message.

Works on Linux and for TCP only; elsewhere the kernel does not count the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import bus.log

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECK_S: Final = 0.05
_CHECKS: Final = 200
_CHECKS_AFTER_CUT: Final = 20  # time for ZeroMQ to free the memory
_GROWTH_BYTES: Final = 64 * 2**20
_SMALL_BYTES: Final = 4 * 2**10
_RECEIVED: Final = struct.Struct("128xQ")  # in `struct tcp_info`
_ABORT: Final = struct.pack("ii", 1, 0)  # for SO_LINGER


class ConnectionGuard:
    """Guards the connections of the server that listens at ``address``.

    Attributes:
        finished: the descriptors of connections that have completed a message, added by the
            server; None while the guard does not watch.
    """

    def __init__(self, address: str) -> None:
        self.finished: set[int] | None = None
        is_counted = sys.platform == "linux" and address.startswith("tcp:")
        self._port = urlsplit(address).port if is_counted else None
        self._statm = os.open("/proc/self/statm" if is_counted else os.devnull, os.O_RDONLY)
        self._spare = os.dup(self._statm)
        self._files = contextlib.ExitStack()
        for file in (self._statm, self._spare):
            self._files.callback(os.close, file)
        self._normal_bytes = self._resident_bytes()
        # By peer: bytes read when it last completed a message; whether it did during this watch.
        self._watched: dict[object, tuple[int, bool]] = {}
        self._checks = self._checks_after_cut = 0

    def close(self) -> None:
        """Closes the guard; connections stay open."""
        self._files.close()

    def check(self) -> None:
        """Checks the memory, and cuts connections. Call it every :data:`CHECK_S` seconds."""
        resident_bytes = self._resident_bytes()
        self._normal_bytes = min(self._normal_bytes, resident_bytes)
        finished, self.finished = self.finished, None
        if resident_bytes <= self._normal_bytes + _GROWTH_BYTES:
            return
        before, self._watched = self._watched, {}
        self._checks = 0 if finished is None else self._checks + 1
        for descriptor, end, peer, read in self._connections():
            mark, is_heard = before.get(peer, (0, True))
            if finished is None:
                mark, is_heard = read, read <= _SMALL_BYTES
            elif descriptor in finished:
                mark, is_heard = read, True
            if read > mark + _SMALL_BYTES or (self._checks >= _CHECKS and not is_heard):
                with contextlib.suppress(OSError):  # it has ended by itself
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                    end.shutdown(socket.SHUT_RDWR)
                self._checks_after_cut = _CHECKS_AFTER_CUT
                bus.log.logger().warning("connection_cut", address=":".join(map(str, peer)))
            else:
                self._watched[peer] = mark, is_heard
        if self._checks_after_cut:
            self._checks_after_cut -= 1
            with contextlib.suppress(AttributeError):  # returns freed memory to the system
                ctypes.CDLL(None).malloc_trim(0)
        elif finished is not None and all(is_heard for _, is_heard in self._watched.values()):
            self._normal_bytes = self._resident_bytes()
            return
        self.finished = set()

    def _connections(self) -> Iterator[tuple[int, socket.socket, tuple[str, int], int]]:
        """Yields the port's connections: descriptor, socket, peer address, and bytes read.

        A socket is valid until the next one is yielded.
        """
        try:
            descriptors = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
        except OSError:  # no descriptor is free
            descriptors = list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        for descriptor in descriptors:
            # ZeroMQ may close its descriptor at any time, and another file may get the number. The
            # spare descriptor is reused, because no new one may be free.
            try:
                os.dup2(descriptor, self._spare, inheritable=False)
                end = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=self._spare)
            except OSError:
                continue
            try:
                own = end.getsockname()
                if isinstance(own, tuple) and own[1] == self._port:
                    peer = end.getpeername()[:2]
                    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
                    unread = fcntl.ioctl(end, termios.FIONREAD, bytes(4))
                    read = _RECEIVED.unpack(info)[0] - int.from_bytes(unread, sys.byteorder)
                    yield descriptor, end, peer, read
            except OSError:  # already closed, or no connection
                continue
            finally:
                end.detach()
        os.dup2(self._statm, self._spare, inheritable=False)

    def _resident_bytes(self) -> int:
        pages = os.pread(self._statm, 64, 0).split()
        return int(pages[1]) * resource.getpagesize() if pages else 0
