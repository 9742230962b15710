"""The store where the ends of a communicator find each other. The trainer runs it.

:mod:`bus.weight_transfer.gloo` and :mod:`bus.weight_transfer.nccl_communicator` make communicators
of their own kind there. The module loads no torch: callers pass ``torch.distributed`` in.
"""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from bus.weight_transfer.allocation import RankAssignment

# What a chunk may take: so long, and its bytes over a slow network.
CHUNK_TIMEOUT_S: Final = 30
SLOW_BYTES_PER_S: Final = 10_000_000
# Sends nothing, and any port will do: it only asks the system for the way there.
_ANY_PORT: Final = 9
# The trainer's store listens before anybody hears of it.
_CONNECT_S: Final = 5.0
# What a TCPStore's greeting may take: both ends ask the DNS for the other's name, which takes
# 5 s where no answer comes.
_GREETING_S: Final = 15.0


def chunk_timeout_s(size_bytes: int) -> int:
    """How long a chunk of that size may take: a deadline on progress, not on the update."""
    return CHUNK_TIMEOUT_S + size_bytes // SLOW_BYTES_PER_S


def open_store(dist: Any, address: str, timeout_s: float) -> Any:
    """The trainer's store, on a free port of this address alone; by itself it would listen on all.

    It is gone when the last reference to it is.

    Raises:
        OSError: it can't listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(dist: Any, host: str, port: int, communicator: int, timeout_s: float) -> Any:
    """One end's view of that store, in the communicator's own part of it.

    Raises:
        OSError: the store is not there.
        RuntimeError: it went away.
    """
    # A TCPStore goes on asking for one that isn't there until its timeout.
    with socket.create_connection((host, port), timeout=_CONNECT_S):
        pass
    greeting = timedelta(seconds=min(_GREETING_S, timeout_s))
    store = dist.TCPStore(host, port, is_master=False, timeout=greeting)
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"wavebus-{communicator}", store)


def gather_messages(store: Any, place: RankAssignment, message: str, timeout_s: float) -> list[str]:
    """Wait until every end is there, and has left its word; return all words, by rank.

    Raises:
        RuntimeError: the store is gone, or not everybody came in time.
    """
    store.set(f"here-{place.rank}", message)
    keys = [f"here-{rank}" for rank in range(place.world_size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    return [store.get(key).decode() for key in keys]


def is_store_alive(store: Any) -> bool:
    """The trainer still keeps the store: its end is open, and its process lives."""
    try:
        store.check(["anything"])
    except RuntimeError:
        return False
    return True


def reason(error: Exception) -> str:
    """What torch says of an error, without its source file, its guesses and the stack of C++."""
    lines = str(error).strip().splitlines()
    text = re.sub(r"^\[\S+:\d+\]\s*", "", lines[0].strip()) if lines else ""
    return text.split(". This is typically", 1)[0] or type(error).__name__


def host_of(address: str) -> str:
    """The host in a ZeroMQ address; this one, where it names none (``ipc``)."""
    return urlsplit(address).hostname or "127.0.0.1"


def address_towards(host: str) -> str:
    """This host's own address, as it is seen on the way to another one.

    Raises:
        OSError: there is no way there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, _ANY_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own
