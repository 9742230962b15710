"""The ZeroMQ transport: a ROUTER socket at the broker, a DEALER socket at each peer.

Beyond loopback both ends need keys, or the option ``insecure``.

Limits for the broker's peers, besides those of :mod:`bus._protocol.core.access`:

- ``RCVHWM``: how many frames of one peer may wait unread. At the limit, its connection is not read
  until some are received. ZeroMQ receives a frame of each peer in turn.
- ``SNDHWM``: how many frames may wait for a peer; further ones are not sent.
- ``TCP_MAXRT``: closes the connection of a peer whose host acknowledges no sent bytes for 10 s.
- ``MAXMSGSIZE``: closes the connection of a peer that sends a far too large frame.
- :mod:`bus._runtime.zmq_connections`: cuts a connection whose message fills the memory and does not
  end.
- ``HANDSHAKE_IVL``: closes a connection that does not complete its handshake.
- ``HEARTBEAT_…``: closes a connection that has become silent, whatever the peer's settings.
- No ``ROUTER_HANDOVER``: a second connection with a route that is in use receives nothing.
- Only the process's limit of open files bounds the number of connections.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import socket as unix_socket
import time
from typing import TYPE_CHECKING, Final

import zmq
import zmq.backend

import bus.log
from bus._keys import Security
from bus._net import LOOKS_LIKE, broker_addresses, check_address, is_loopback
from bus._runtime.zmq_connections import CHECK_S, ConnectionGuard
from bus._runtime.zmq_curve import ZapHandler, secure_client, secure_server
from bus._runtime.zmq_socket import ZmqSocket
from bus.errors import UsageError
from bus.messages import MAX_FRAME_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from bus._keys import Keyring
    from bus._net import Broker
    from bus._runtime.interfaces import OnFrame, OnRoutedFrame

MAX_PEERS: Final = 16_384
# A frame that is somewhat too large is read, so that its sender gets a reason; one that is
# far too large costs its sender the connection.
_MAX_RECV_BYTES: Final = 2 * MAX_FRAME_BYTES
_BATCH: Final = 512
_QUEUE: Final = 10_000
_UNREAD: Final = 64
_UNSENT: Final = 2_000  # a trainer has at most 1,024 requests open, each of them one frame
_UNTAKEN_MS: Final = 10_000
_HANDSHAKE_MS: Final = 10_000
# Slower than the peers' own heartbeats, so that those take effect.
_SERVER_HEARTBEAT_MS: Final = 15_000
# Plain integers: arithmetic on the flags takes as long as a small send.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Skips pyzmq's check of options that are never used here, which takes as long as the send.
_send: Final = zmq.backend.Socket.send
_recv: Final = zmq.backend.Socket.recv

# How long the last frames, such as LEAVE, may wait for a busy host; without a peer nothing waits.
_LINGER_MS: Final = 2_000
_REBIND_S: Final = 1.0
_RECONNECT_S: Final = 2.0
_RECONNECT_PAUSE_S: Final = 0.25
# Longer than a healthy broker is silent to a peer; doubles after each reconnect.
_SILENCE_LIMIT_S: Final = 6.0
_MAX_SILENCE_LIMIT_S: Final = 30.0
# By process, because forks need their own: the first is that of sockets without a handler for keys,
# the others have one handler each.
_contexts: dict[int, list[zmq.Context[zmq.Socket[bytes]]]] = {}


def _context(*, has_handler: bool = False) -> zmq.Context[zmq.Socket[bytes]]:
    """Returns the ZeroMQ context that the process shares; with ``has_handler``, a new one."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = [_new_context()]
        atexit.register(_flush, pid)
    if has_handler:
        _contexts[pid].append(_new_context())
    return _contexts[pid][-1 if has_handler else 0]


def _new_context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_PEERS)
    return context


def _flush(pid: int) -> None:
    """Waits until the last frames, such as LEAVE, are sent, before the process ends."""
    if pid == os.getpid():
        for context in _contexts.pop(pid):
            context.destroy(linger=_LINGER_MS)


def _harden(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_RECV_BYTES)
    socket.setsockopt(zmq.SNDHWM, _QUEUE)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    """Binds a socket; retries for a second while another socket has the address."""
    deadline_s = time.monotonic() + _REBIND_S
    while True:
        try:
            if address.startswith("ipc://") and _is_taken(address.removeprefix("ipc://")):
                raise zmq.ZMQError(errno.EADDRINUSE)  # ZeroMQ would replace the other socket
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                raise
            time.sleep(_REBIND_S / 20)
        else:
            return


def _is_taken(path: str) -> bool:
    """Returns whether another process listens at a Unix socket."""
    with contextlib.suppress(OSError), unix_socket.socket(unix_socket.AF_UNIX) as probe:
        probe.connect(path)
        return True
    return False


class ZmqServer(ZmqSocket):
    """The broker's ROUTER socket.

    Args:
        address: where to bind, such as ``tcp://127.0.0.1:7710``; port ``*`` or 0 is any free port
            (see :attr:`address`).
        keyring: the broker's key and those of authorised peers; the attribute may be replaced
            later. None: no keys, and only loopback.
        insecure: whether to bind beyond loopback without keys.

    Raises:
        UsageError: the address is malformed, in use, or beyond loopback without keys.
    """

    def __init__(
        self, address: str, *, keyring: Keyring | None = None, insecure: bool = False
    ) -> None:
        if keyring is None:
            _refuse_open(address, insecure=insecure, what="anyone who reaches it may")
        self.keyring = keyring
        context = _context(has_handler=keyring is not None)
        socket = context.socket(zmq.ROUTER)
        _harden(socket)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.setsockopt(zmq.RCVHWM, _UNREAD)
        socket.setsockopt(zmq.SNDHWM, _UNSENT)
        socket.setsockopt(zmq.TCP_MAXRT, _UNTAKEN_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.BACKLOG, 4096)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _SERVER_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SERVER_HEARTBEAT_MS)
        self._zap_handler = ZapHandler(context, self._is_authorized) if keyring else None
        try:
            if keyring:
                secure_server(socket, keyring.own)
            _bind(socket, address)
        except (zmq.ZMQError, UsageError) as error:
            socket.close()
            if self._zap_handler is not None:
                self._zap_handler.close()
            if isinstance(error, UsageError):
                raise
            raise UsageError(_explain(address, error)) from error
        super().__init__(socket)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
        self._on_frame: OnRoutedFrame | None = None
        self._guard = ConnectionGuard(self.address)
        self._check: asyncio.TimerHandle | None = None
        self._is_skipping = False  # drop the rest of a message with too many parts

    def close(self) -> None:
        """Closes the socket; no callback comes after this."""
        if self._check is not None:
            self._check.cancel()
        self._guard.close()
        super().close()
        if self._zap_handler is not None:
            self._zap_handler.close()

    def _is_authorized(self, public: str) -> bool:
        return self.keyring is not None and public in self.keyring.authorized

    def listen(self, on_frame: OnRoutedFrame) -> None:
        """Starts to receive; calls ``on_frame(route, frame, user)`` for every frame."""
        self._on_frame = on_frame
        self.watch()
        self._check_connections()

    def _check_connections(self) -> None:
        self._guard.check()
        self._check = self._loop.call_later(CHECK_S, self._check_connections)

    def receive_batch(self) -> bool:
        """Receives a batch of frames; returns True if none is left, else False."""
        assert self._on_frame is not None
        on_frame, socket, finished = self._on_frame, self.socket, self._guard.finished
        for _ in range(_BATCH):
            if self._is_skipping:  # part by part, so that each turn of the loop is bounded
                self._is_skipping = _recv(socket, _NOBLOCK, False).more
                continue
            try:
                route = _recv(socket, _NOBLOCK)
            except zmq.Again:
                return True
            part = _recv(socket, _NOBLOCK, False)  # a route always has a second part
            # The key of this frame's connection, as the handler has set it.
            user = str(part.get("User-Id")) if self._zap_handler is not None else ""
            if finished is not None:
                finished.add(int(part.get(zmq.SRCFD)))
            frame = part.bytes
            if part.more:  # too many parts: no frame of a peer
                self._is_skipping, frame = True, b""
            on_frame(route, frame, user)
            if self._closed:
                return True
        return False

    def send(self, routes: Iterable[bytes], frame: bytes) -> list[bytes]:
        """Sends a frame to each route; returns the routes that can't be reached now."""
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
        self.drain_soon()
        return unreachable


class ZmqClient(ZmqSocket):
    """A peer's DEALER socket, connected to the broker.

    A broker may move: a connection that brings no answer is replaced by one to the next address.
    At most one of the addresses may have a broker at a time, because peers of two brokers would not
    find each other.

    Args:
        broker: where the broker runs: one address, several separated by commas, or a function that
            returns the present one.
        route: the peer's route; unique among all peers and all their lives. A connection that
            replaces one without answers gets a route of its own.
        security: the keys to connect with. None: no keys, and only loopback.

    Raises:
        UsageError: an address is malformed, or beyond loopback and ``security`` has no keys.
    """

    def __init__(self, broker: Broker, route: bytes, security: Security | None = None) -> None:
        self._security = security = security or Security()
        addresses = broker_addresses(broker) if isinstance(broker, str) else ()
        for address in addresses:
            self._require_keys(address)
        socket = _context().socket(zmq.DEALER)
        _harden(socket)
        secure_client(socket, security)
        socket.setsockopt(zmq.ROUTING_ID, route)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # don't queue for a broker that isn't there
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # Half-open connections end by themselves, without the bus's own heartbeats: the client
        # pings, and the TTL in the ping tells the broker when to close.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 15_000)
        super().__init__(socket)
        self._find = broker if callable(broker) else None
        self._finding: asyncio.Future[str] | None = None
        self._addresses = itertools.cycle(addresses)
        self.address = ""
        self._route = route
        self._connections = 1
        self._reached_s = time.monotonic()
        self._unanswered_since_s = (
            0.0  # when the first frame without an answer was sent; 0: there is none
        )
        self._silence_limit_s = _SILENCE_LIMIT_S
        self._on_frame: OnFrame | None = None
        try:
            self._connect()
        except UsageError:
            self.close()
            raise

    def listen(self, on_frame: OnFrame) -> None:
        """Starts to receive; calls ``on_frame(frame)`` for every frame."""
        self._on_frame = on_frame
        self.watch()

    def _require_keys(self, address: str) -> None:
        """Raises ``UsageError`` if an address is beyond loopback and there are no keys."""
        if self._security.own is None:
            what = "anyone on the way, or in the broker's place, may"
            _refuse_open(address, insecure=self._security.insecure, what=what)

    def receive_batch(self) -> bool:
        """Receives a batch of frames; returns True if none is left, else False."""
        assert self._on_frame is not None
        recv, on_frame = self.socket.recv, self._on_frame
        for _ in range(_BATCH):
            try:
                frame = recv(_NOBLOCK)
            except zmq.Again:
                return True
            self._unanswered_since_s, self._silence_limit_s = 0.0, _SILENCE_LIMIT_S
            on_frame(frame)  # a broker's frames have one part; other parts are decoded one by one
            if self._closed or not self._has_more():
                return True
        return False

    def send(self, frame: bytes) -> bool:
        """Sends a frame; returns False if the broker can't be reached now."""
        try:
            _send(self.socket, frame, _NOBLOCK)
        except zmq.Again:
            self._reconnect_if_idle()
            return False
        finally:
            self.drain_soon()
        now_s, before_s = time.monotonic(), self._reached_s
        self._reached_s = now_s
        self._unanswered_since_s = self._unanswered_since_s or now_s
        if now_s <= self._unanswered_since_s + self._silence_limit_s:
            return True
        if now_s > before_s + self._silence_limit_s or self._has_more():
            self._unanswered_since_s = now_s  # this process did not run: an answer may wait unread
        else:
            # A broker that did not run for a while may have accepted this connection while it still
            # had the previous one, with the same route. It then never reads from this one.
            self._silence_limit_s = min(2 * self._silence_limit_s, _MAX_SILENCE_LIMIT_S)
            self._connections += 1
            route = b"%s/%d" % (self._route, self._connections)
            self.socket.setsockopt(zmq.ROUTING_ID, route)  # of connections from now on
            self._reconnect()
        return True

    def _reconnect_if_idle(self) -> None:
        """Reconnects if nothing was sent for a while.

        ZeroMQ never retries a broker that has refused the handshake, but the broker's keys may have
        changed.
        """
        if time.monotonic() < self._reached_s + _RECONNECT_S:
            return
        self._reached_s = time.monotonic()
        self._reconnect()

    def _reconnect(self) -> None:
        """Closes the connection, gives the broker time to notice, then connects again."""
        self._unanswered_since_s = 0.0  # the answers to earlier frames are lost
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disconnect(self.address)
        self._loop.call_later(_RECONNECT_PAUSE_S, self._connect)

    def _connect(self) -> None:
        """Connects to the next address. Without one, the next failed send tries again."""
        if self._closed:
            return
        if self._find is None:
            self._connect_to(next(self._addresses))
        elif self._finding is None:
            self._finding = self._loop.run_in_executor(None, self._find)
            self._finding.add_done_callback(self._on_found)

    def _on_found(self, found: asyncio.Future[str]) -> None:
        self._finding = None
        if self._closed or found.cancelled():
            return
        try:
            address = found.result()
            if address:
                self._require_keys(address)
                self._connect_to(address)
        except Exception as error:  # noqa: BLE001 - of the caller's function
            bus.log.logger().warning("broker_not_found", detail=f"{type(error).__name__}: {error}")

    def _connect_to(self, address: str) -> None:
        self.address = address
        self.socket.setsockopt(zmq.IPV6, int("[" in address))  # of connections from now on
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            raise UsageError(_explain(address, error)) from error


def _refuse_open(address: str, *, insecure: bool, what: str) -> None:
    """Checks that an address without keys is on loopback; with ``insecure``, logs a warning.

    Raises:
        UsageError: the address is malformed, or beyond loopback without ``insecure``.
    """
    check_address(address)
    if is_loopback(address):
        return
    threat = f"{what} pause engines and replace their weights"
    if not insecure:
        raise UsageError(
            f"{address} is not a loopback address, and no keys are given, so {threat}. Make keys "
            "(`wavebus keygen`), and give the broker --curve-keys, peers --key and --broker-key; "
            "or give --insecure"
        )
    bus.log.logger().warning("insecure", address=address, detail=f"without keys, {threat}")


def _explain(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{address} is in use: another broker may run there (`wavebus status --broker "
            f"{address}`); choose another port"
        )
    return f"{address}: {error.strerror}; {LOOKS_LIKE}"


def library_version() -> str:
    """Returns the version of the ZeroMQ library."""
    return zmq.zmq_version()
