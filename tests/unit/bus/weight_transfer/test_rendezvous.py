"""Where the ends of a communicator find each other."""

from __future__ import annotations

import socket

import pytest

from bus._weight_transfer import rendezvous
from bus._weight_transfer.allocation import RankAssignment, World
from bus._weight_transfer.formats import GlooInit, NcclInit, decode, encode
from bus.errors import WavebusError

LOCAL = "127.0.0.1"
DUPLICATE = """NCCL error in: /x/NCCLUtils.cpp:77, invalid usage, NCCL version 2.29.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0
"""


def test_patience_grows_with_the_chunk() -> None:
    """Thirty seconds, and one more per 10 MB."""
    assert rendezvous.chunk_timeout_s(0) == 30
    assert rendezvous.chunk_timeout_s(64_000_000) == 36


@pytest.mark.parametrize(("chunk_bytes", "timeout_ms"), [(0, 30_000), (64_000_000, 36_000)])
def test_it_gives_the_ends_what_they_need(chunk_bytes: int, timeout_ms: int) -> None:
    """The same for both backends: where they meet, the secret, the buffers, and the patience."""
    point = rendezvous.MeetingPoint.open(World(1, 2, LOCAL), chunk_bytes, 3)
    init = NcclInit(**point.params, version="2.29.7")
    ports = point.store.port, point.listener.port
    assert (init.host, init.port, init.barrier_port) == (LOCAL, *ports)
    assert (init.chunk_bytes, init.buffers, init.timeout_ms) == (chunk_bytes, 3, timeout_ms)
    assert decode(encode(init), NcclInit) == init
    point.close()


@pytest.mark.parametrize("port", ["store", "listener"])
def test_it_listens_on_its_address_alone(port: str) -> None:
    """Left to itself, torch's store would listen on all of them."""
    point = rendezvous.MeetingPoint.open(World(1, 2, LOCAL), 1, 1)
    number = getattr(point, port).port
    with socket.create_connection((LOCAL, number)):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", number))
    point.close()


def test_ports_can_be_chosen() -> None:
    """As a firewall between trainer and engines may need."""
    with socket.create_server((LOCAL, 0)) as first, socket.create_server((LOCAL, 0)) as second:
        ports = first.getsockname()[1], second.getsockname()[1]
    point = rendezvous.MeetingPoint.open(World(1, 2, LOCAL, ports=ports), 1, 1)
    assert (point.store.port, point.listener.port) == ports
    with pytest.raises(WavebusError, match=f"can't listen at {LOCAL}: .*in use"):
        rendezvous.MeetingPoint.open(World(1, 2, LOCAL, ports=(0, ports[1])), 1, 1)
    point.close()


def test_chosen_ports_are_free_again_at_once() -> None:
    """Though the error of a meeting that failed may still hold the point."""
    point = rendezvous.MeetingPoint.open(World(1, 2, LOCAL), 1, 1)
    ports = point.store.port, point.listener.port
    init = GlooInit(**{**point.params, "timeout_ms": 100})
    with pytest.raises(RuntimeError, match="rank 1 did not come within") as failed:
        rendezvous.meet(init, RankAssignment(1, 2, 0), point, "", 1)
    point.close()
    again = rendezvous.MeetingPoint.open(World(1, 2, LOCAL, ports=ports), 1, 1)
    assert (again.store.port, again.listener.port) == ports
    again.close()
    assert failed.value


def test_an_address_of_another_host_is_no_place_to_meet() -> None:
    with pytest.raises(WavebusError, match=r"192\.0\.2\.1: .*assign requested address"):
        rendezvous.MeetingPoint.open(World(1, 2, "192.0.2.1"), 1, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (DUPLICATE, "Duplicate GPU detected : rank 1 and rank 0"),
        ("[/x/y.cpp:5] Connection closed. This is typically", "Connection closed"),
        ("Last error:\n", "Last error:"),
        ("", "RuntimeError"),
    ],
)
def test_nccls_last_word_is_told(text: str, told: str) -> None:
    assert rendezvous.reason(RuntimeError(text)) == told
