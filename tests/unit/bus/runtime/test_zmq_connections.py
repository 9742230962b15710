"""Who fills a server's memory with messages without an end is cut, and nobody else."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from bus._runtime import zmq_connections as module
from bus._runtime.zmq_connections import ConnectionGuard
from bus.messages import Nack, NackCode, codec
from tests.support.keys import KeyFolder
from tests.support.procs import Proc, run_wavebus, wavebus
from tests.support.zmtp import RawPeer, frame

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB: Final = 2**20
SMALL: Final = module._SMALL_BYTES
LARGE: Final = b"x" * 2 * SMALL
LIMIT_S: Final = 60.0


class Port:
    """A listening port with a guard, and connections to it whose data is read at once."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.guard = ConnectionGuard(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")
        self._ends: list[socket.socket] = [self._listener]
        self._memory = b""

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(self._listener.getsockname())
        server, _ = self._listener.accept()
        client.settimeout(0)
        self._ends += [client, server]
        return client, server

    def send(self, ends: tuple[socket.socket, socket.socket], data: bytes = LARGE) -> None:
        ends[0].sendall(data)
        left = len(data)
        while left:
            left -= len(ends[1].recv(left))

    def grow(self) -> None:
        """Use more memory than is normal."""
        self._memory += b"x" * (module._GROWTH_BYTES + 16 * MIB)

    def close(self) -> None:
        self.guard.close()
        for end in self._ends:
            end.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def is_cut(ends: tuple[socket.socket, socket.socket]) -> bool:
    try:
        return ends[0].recv(1) == b""
    except BlockingIOError:
        return False


# -- the guard alone ----------------------------------------------------------------


def test_nobody_is_watched_while_the_memory_is_normal(port: Port) -> None:
    ends = port.connect()
    port.guard.check()
    port.send(ends)
    port.guard.check()
    assert port.guard.finished is None
    assert not is_cut(ends)


def test_who_sends_on_and_finishes_nothing_is_cut(port: Port) -> None:
    """Also one that has come since the last check. Others send a little, or finish messages."""
    endless, finishing, small = port.connect(), port.connect(), port.connect()
    port.grow()
    port.guard.check()
    assert port.guard.finished == set()
    new = port.connect()
    for each in (endless, finishing, new):
        port.send(each)
    port.send(small, LARGE[:SMALL])
    port.guard.finished.add(finishing[1].fileno())
    port.guard.check()
    assert [is_cut(each) for each in (endless, new, finishing, small)] == [True, True, False, False]


def test_what_the_kernel_holds_is_not_zeromqs(port: Port) -> None:
    """A loop that is late finds what peers have sent meanwhile unread."""
    ends = port.connect()
    port.grow()
    port.guard.check()
    ends[0].sendall(LARGE)
    port.guard.check()
    assert not is_cut(ends)


def test_who_holds_what_it_had_sent_is_cut_at_last(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the watch it had sent much, and it finishes nothing in time."""
    monkeypatch.setattr(module, "_CHECKS", 3)
    holding, finishing = port.connect(), port.connect()
    port.send(holding)
    port.send(finishing)
    port.grow()
    port.guard.check()
    for _ in range(2):
        assert port.guard.finished is not None
        port.guard.finished.add(finishing[1].fileno())
        port.guard.check()
    assert not is_cut(holding)
    port.guard.check()
    assert is_cut(holding)
    assert not is_cut(finishing)


def test_memory_that_no_connection_holds_is_normal(port: Port) -> None:
    """Everybody has finished a message since. What is used beyond that is watched again."""
    ends = port.connect()
    port.send(ends)
    port.grow()
    port.guard.check()
    port.guard.check()
    assert port.guard.finished is not None  # it has not finished any
    port.guard.finished.add(ends[1].fileno())
    port.guard.check()
    assert port.guard.finished is None
    port.guard.check()
    assert port.guard.finished is None
    port.grow()
    port.guard.check()
    assert port.guard.finished == set()


def test_no_descriptor_is_left_open(port: Port) -> None:
    for _ in range(3):
        port.connect()
    port.grow()
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - with its own, both times
    port.guard.check()
    port.guard.check()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_a_guard_of_a_unix_socket_does_nothing() -> None:
    with contextlib.closing(ConnectionGuard("ipc:///tmp/wavebus.sock")) as guard:
        guard.check()
        assert guard.finished is None


# -- a broker's ---------------------------------------------------------------------


@contextlib.contextmanager
def a_broker(*options: str) -> Iterator[tuple[Proc, str]]:
    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", *options) as broker:
        yield broker, broker.first_line()


def resident_bytes(broker: Proc) -> int:
    pages = int(Path(f"/proc/{broker.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_for_memory(broker: Proc, limit_bytes: int) -> None:
    """Until the broker uses no more."""
    deadline_s = time.monotonic() + LIMIT_S
    while resident_bytes(broker) > limit_bytes:
        assert time.monotonic() < deadline_s, resident_bytes(broker)
        time.sleep(0.01)


def test_a_message_of_parts_without_an_end_costs_its_sender_the_connection() -> None:
    """With parts of any size. Before, the broker kept as much as came."""
    with a_broker() as (broker, address):
        normal_bytes = resident_bytes(broker)
        for body, size in ((b"x" * 65_536, 2**31), (b"", 2**27)):
            part = frame(body, more=True)
            parts = part * (MIB // len(part))
            with RawPeer(address) as peer:
                assert peer.pour(parts, size // MIB)
            broker.wait_event("connection_cut")
            wait_for_memory(broker, normal_bytes + module._GROWTH_BYTES)
        assert run_wavebus("status", "--broker", address).returncode == 0


def test_a_message_of_parts_that_ends_is_refused_and_its_sender_stays() -> None:
    with a_broker() as (_, address), RawPeer(address) as peer:
        peer.send(*[b""] * 5_000)
        for _ in range(2):
            nack = codec.decode(peer.receive())[1]
            assert isinstance(nack, Nack)
            assert nack.code is NackCode.MALFORMED
            peer.send(b"x")


def test_frames_of_handshakes_cost_their_senders_the_connection(tmp_path: Path) -> None:
    """Who has no key sends frames of 31 MiB instead of a handshake."""
    keys = KeyFolder(tmp_path)
    command = frame(b"", command=True, size=31 * MIB)

    def pour(_: int) -> bool:
        with RawPeer(address, mechanism=b"CURVE") as peer:
            peer.socket.sendall(command)
            return peer.pour(b"x" * MIB, 30)

    with a_broker("--curve-keys", str(keys.broker)) as (broker, address):
        normal_bytes = resident_bytes(broker)
        with ThreadPoolExecutor(20) as threads:
            assert all(threads.map(pour, range(20)))
        broker.wait_event("connection_cut")
        wait_for_memory(broker, normal_bytes + module._GROWTH_BYTES)
