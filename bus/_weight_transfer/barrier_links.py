"""Connects the ends of a communicator to its root, for their entry barrier.

A receiver shows the secret of the transport, which it got over the bus, and its rank. Connections
that show something else are closed. When all receivers are there, all ends get the greetings of
all. An end that leaves meanwhile ends the meeting for all.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

import msgspec

from bus._weight_transfer.entry_barrier import BEAT_S, CLOSED, EndLink, EntryBarrier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus._weight_transfer.allocation import RankAssignment

TOKEN_BYTES: Final = 16
MAX_GREETING_BYTES: Final = 1024
_HELLO: Final = struct.Struct("<16sQIH")  # token, communicator, rank, bytes of the greeting
_LENGTH: Final = struct.Struct("<I")
_MAX_GREETINGS_BYTES: Final = 16 << 20
# A connection that has not said who it is counts against this, so that strangers stay few.
_MAX_STRANGERS: Final = 64
_CONNECT_S: Final = 5.0
_NO_NAMES: Final[Mapping[str, int]] = {}


def new_token() -> bytes:
    """Returns a secret, by which the root knows the receivers of its transport."""
    return secrets.token_bytes(TOKEN_BYTES)


def create_server(address: str, port: int) -> socket.socket:
    """Returns a socket that listens on one address.

    Args:
        address: the address, of either version of IP.
        port: the port; 0: any.

    Raises:
        OSError: it can't listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


class Listener:
    """Where the root waits for the receivers of one communicator.

    Args:
        token: the secret that receivers show.
        port: the port to listen on; 0: any.
        first_ranks: the rank of each engine's first worker, to name an end by its engine.

    Attributes:
        port: the port it listens on.
        met: the connections of the receivers that have come, by rank.

    Raises:
        OSError: it can't listen there.
    """

    def __init__(
        self, address: str, token: bytes, port: int = 0, first_ranks: Mapping[str, int] = _NO_NAMES
    ) -> None:
        self._first_ranks = first_ranks
        self._socket = create_server(address, port)
        self._socket.setblocking(False)
        self._token = token
        self.met: dict[int, EndLink] = {}
        self._closed = False
        self._barrier: EntryBarrier | None = None
        self._meeting = False
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Stops listening, and closes the barrier; a :meth:`meet` in another thread raises."""
        self._closed = True
        if not self._meeting:
            self._socket.close()
        if self._barrier is not None:
            self._barrier.close()

    def meet(
        self, place: RankAssignment, greeting: str, *, timeout_s: float, silence_s: float
    ) -> EntryBarrier:
        """Waits until all receivers are connected.

        Args:
            place: the root's rank, and how many ends there are.
            greeting: what all ends get from this one.
            silence_s: as of :class:`EntryBarrier`.

        Raises:
            OSError: a receiver left meanwhile.
            RuntimeError: a receiver did not come in time, or left meanwhile, or this was closed.
        """
        links = self.met
        greetings = {0: greeting}
        strangers: list[EndLink] = []
        deadline = time.monotonic() + timeout_s
        self._meeting = True
        try:
            with self._socket, selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                while len(links) < place.world_size - 1:
                    for key, _ in selector.select(BEAT_S):
                        if key.data is None:
                            self._accept(selector, strangers)
                            continue
                        who = _read_hello(key.data, self._token, place, links)
                        if key.data in links.values():
                            raise RuntimeError(f"{key.data.name} left while others connected")
                        if who is None:
                            continue
                        strangers.remove(key.data)
                        if isinstance(who, str):
                            selector.unregister(key.data.connection)
                            key.data.connection.close()
                            continue
                        rank, greetings[rank] = who
                        key.data.name = f"{self._name_of(rank)} ({greetings[rank].rstrip()})"
                        links[rank] = key.data
                    if self._closed:
                        raise RuntimeError(CLOSED)
                    if time.monotonic() > deadline:
                        missing = sorted(set(range(1, place.world_size)) - set(links))
                        names = "; ".join(map(self._name_of, missing))
                        raise RuntimeError(f"{names} did not come within {timeout_s:g} s")
            said = [greetings[rank] for rank in range(place.world_size)]
            blob = msgspec.msgpack.encode(said)
            for link in links.values():
                link.connection.setblocking(True)
                link.connection.settimeout(timeout_s)
                link.connection.sendall(_LENGTH.pack(len(blob)) + blob)
        except BaseException:
            for link in (*strangers, *links.values()):
                link.connection.close()
            raise
        for link in strangers:
            link.connection.close()
        self._barrier = made = EntryBarrier(links, said, silence_s=silence_s)
        if self._closed:
            made.close()
        return made

    def _name_of(self, rank: int) -> str:
        of = [(first, name) for name, first in self._first_ranks.items() if first <= rank]
        return f"{max(of)[1]}, rank {rank}" if of else f"rank {rank}"

    def _accept(self, selector: selectors.BaseSelector, strangers: list[EndLink]) -> None:
        try:
            connection, address = self._socket.accept()
        except OSError:  # it left again, or this process has no descriptor left
            time.sleep(BEAT_S)
            return
        if len(strangers) >= _MAX_STRANGERS:  # the oldest has had its time
            selector.unregister(strangers[0].connection)
            strangers.pop(0).connection.close()
        connection.setblocking(False)
        _set_options(connection)
        strangers.append(EndLink(connection, str(address)))
        selector.register(connection, selectors.EVENT_READ, strangers[-1])


def connect(
    address: tuple[str, int],
    token: bytes,
    place: RankAssignment,
    greeting: str,
    *,
    timeout_s: float,
    silence_s: float,
) -> EntryBarrier:
    """Connects a receiver to the root; returns when all ends are connected.

    Args:
        address: host and port of the root's :class:`Listener`.
        token: the root's secret.
        greeting: what all ends get from this one.
        silence_s: as of :class:`EntryBarrier`.

    Raises:
        OSError: nobody listens there, or the root did not answer in time.
        RuntimeError: the root is gone, or refuses this end.
    """
    # The root listens before its address is announced, so it answers soon or not at all.
    connection = socket.create_connection(address, timeout=min(_CONNECT_S, timeout_s))
    connection.settimeout(timeout_s)
    try:
        _set_options(connection)
        said = greeting.encode()[:MAX_GREETING_BYTES]
        connection.sendall(_HELLO.pack(token, place.communicator, place.rank, len(said)) + said)
        length = _LENGTH.unpack(_receive(connection, _LENGTH.size))[0]
        if length > _MAX_GREETINGS_BYTES:
            raise RuntimeError("the trainer's end sent something else")
        greetings = msgspec.msgpack.decode(_receive(connection, length), type=list[str])
        if len(greetings) != place.world_size:
            raise RuntimeError(f"{len(greetings)} ends met, not {place.world_size}")
    except BaseException:
        connection.close()
        raise
    root = EndLink(connection, "the trainer's end")
    return EntryBarrier({0: root}, greetings, silence_s=silence_s)


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        some = connection.recv(size - len(read))
        if not some:
            raise RuntimeError("the trainer's end is closed or gone, or refuses this one")
        read += some
    return read


def _read_hello(
    link: EndLink, token: bytes, place: RankAssignment, links: dict[int, EndLink]
) -> tuple[int, str] | str | None:
    """Reads who connects.

    Returns:
        The rank and its greeting; None: more must come; a text: why it is none of ours.
    """
    try:
        some = link.connection.recv(_HELLO.size + MAX_GREETING_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:
        return str(error)
    if not some:
        return "it left"
    link.received += some
    if len(link.received) < _HELLO.size:
        return None
    shown, communicator, rank, length = _HELLO.unpack(link.received[: _HELLO.size])
    if not hmac.compare_digest(shown, token) or communicator != place.communicator:
        return "it belongs to another transport"
    if not 0 < rank < place.world_size or rank in links or length > MAX_GREETING_BYTES:
        return f"rank {rank} is not free"
    if len(link.received) < _HELLO.size + length:
        return None
    if len(link.received) > _HELLO.size + length:
        return "it sent more than its greeting"
    greeting = link.received[_HELLO.size :].decode(errors="replace")
    link.received.clear()
    return rank, greeting
