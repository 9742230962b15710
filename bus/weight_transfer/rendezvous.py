"""Connects the ends of a communicator through a store that the trainer runs.

:mod:`bus.weight_transfer.gloo` and :mod:`bus.weight_transfer.nccl_communicator` use the store to
make their communicators.
"""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import torch.distributed as dist

from bus.errors import WavebusError

if TYPE_CHECKING:
    from bus.weight_transfer.allocation import RankAssignment

# A chunk may take CHUNK_TIMEOUT_S, and as long as its bytes take over a slow network.
CHUNK_TIMEOUT_S: Final = 30
SLOW_BYTES_PER_S: Final = 10_000_000
# Nothing is sent to this port: connecting a UDP socket only asks the system for the route.
_ANY_PORT: Final = 9
# Short, because the trainer's store listens before its address is announced.
_CONNECT_S: Final = 5.0
# Time for a TCPStore's handshake. Both ends ask DNS for the other's name, which takes 5 s without
# an answer.
_GREETING_S: Final = 15.0


def chunk_timeout_s(size_bytes: int) -> int:
    """Returns how long the transfer of one chunk may take, in seconds.

    It is a deadline on progress, not on the update: 30 s, and 1 s more per 10 MB.

    Args:
        size_bytes: the chunk's size in bytes.
    """
    return CHUNK_TIMEOUT_S + size_bytes // SLOW_BYTES_PER_S


def open_store(address: str, timeout_s: float) -> Any:
    """Opens the trainer's store (a ``TCPStore``) on a free port of one address.

    A store that torch opens by itself would listen on all addresses. The store ends with the last
    reference to it.

    Args:
        address: the address to listen on.
        timeout_s: how long its operations may take, in seconds.

    Raises:
        WavebusError: it can't listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family)
        return dist.TCPStore(  # type: ignore[attr-defined]
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    except (RuntimeError, OSError) as error:
        raise WavebusError(f"can't open a store at {address}: {error}") from error


def connect_store(host: str, port: int, communicator: int, timeout_s: float) -> Any:
    """Connects to the trainer's store, and returns the communicator's part of it.

    Args:
        host: the store's host.
        port: the store's port.
        communicator: the communicator's number.
        timeout_s: how long later operations may take, in seconds.

    Raises:
        OSError: no store listens there.
        RuntimeError: the store went away.
    """
    # A TCPStore alone would retry a missing store until its timeout.
    with socket.create_connection((host, port), timeout=_CONNECT_S):
        pass
    greeting = timedelta(seconds=min(_GREETING_S, timeout_s))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=greeting
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"wavebus-{communicator}", store)  # type: ignore[attr-defined]


def gather_messages(store: Any, place: RankAssignment, message: str, timeout_s: float) -> list[str]:
    """Waits until every end has left its message in the store.

    Args:
        store: the communicator's part of the store.
        place: this end's rank.
        message: this end's message.
        timeout_s: how long to wait, in seconds.

    Returns:
        All messages, by rank.

    Raises:
        RuntimeError: the store is gone, or an end did not come in time.
    """
    store.set(f"here-{place.rank}", message)
    keys = [f"here-{rank}" for rank in range(place.world_size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    return [store.get(key).decode() for key in keys]


def is_store_alive(store: Any) -> bool:
    """Returns whether the trainer's store still answers.

    The store answers as long as the trainer's process lives and its end is open.

    Args:
        store: the communicator's part of the store.
    """
    try:
        store.check(["anything"])
    except RuntimeError:
        return False
    return True


def reason(error: Exception) -> str:
    """Returns torch's text of an error, without source file, guesses and C++ stack.

    Args:
        error: what torch has raised.
    """
    lines = str(error).strip().splitlines()
    text = re.sub(r"^\[\S+:\d+\]\s*", "", lines[0].strip()) if lines else ""
    return text.split(". This is typically", 1)[0] or type(error).__name__


def host_of(address: str) -> str:
    """Returns the host in a ZeroMQ address; this host if it names none (``ipc``).

    Args:
        address: such as ``tcp://10.0.0.1:7710``.
    """
    return urlsplit(address).hostname or "127.0.0.1"


def address_towards(host: str) -> str:
    """Returns this host's own address, as another host sees it.

    Args:
        host: the other host.

    Raises:
        OSError: there is no route to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, _ANY_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own
