"""Connects the ends of a communicator at the trainer: where they meet, and the store of torch.

First all ends meet (:mod:`bus._weight_transfer.barrier_links`), and keep an entry barrier open.
Then :mod:`bus._weight_transfer.gloo` and :mod:`bus._weight_transfer.nccl_communicator` make their
communicators through the store.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import torch.distributed as dist

from bus._weight_transfer import barrier_links
from bus.errors import WavebusError

if TYPE_CHECKING:
    from bus._weight_transfer.allocation import RankAssignment, World
    from bus._weight_transfer.entry_barrier import EntryBarrier
    from bus._weight_transfer.formats import GlooInit

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


@dataclass(slots=True)
class MeetingPoint:
    """What the trainer opens for the ends of one communicator.

    Attributes:
        store: torch's store, a ``TCPStore``, which ends with the last reference to it.
        listener: where the ends meet.
        params: the fields of :class:`~bus._weight_transfer.formats.GlooInit`, by name.
    """

    store: Any
    listener: barrier_links.Listener
    params: dict[str, Any]

    @classmethod
    def open(cls, world: World, chunk_bytes: int, buffers: int) -> MeetingPoint:
        """Opens a store and a listener on one address.

        A store that torch opens by itself would listen on all addresses.

        Args:
            world: the communicator: the address and ports to listen on, and its engines.
            chunk_bytes: size of one buffer in bytes; 0 if chunks are sent unpacked.
            buffers: how many chunks may be in flight.

        Raises:
            WavebusError: it can't listen there.
        """
        token = barrier_links.new_token()
        timeout_s = chunk_timeout_s(chunk_bytes)
        try:
            listening = barrier_links.create_server(world.address, world.ports[0])
            with listening:  # if the next one fails
                listener = barrier_links.Listener(
                    world.address, token, world.ports[1], world.first_ranks
                )
                store = dist.TCPStore(  # type: ignore[attr-defined]
                    world.address,
                    listening.getsockname()[1],
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=timeout_s),
                    master_listen_fd=listening.detach(),
                )
        except (RuntimeError, OSError) as error:
            raise WavebusError(f"can't listen at {world.address}: {error}") from error
        params = {
            "host": world.address,
            "port": store.port,
            "barrier_port": listener.port,
            "token": token,
            "chunk_bytes": chunk_bytes,
            "buffers": buffers,
            "timeout_ms": timeout_s * 1000,
        }
        return cls(store, listener, params)

    def close(self) -> None:
        """Stops listening at both ports; a meeting in another thread raises."""
        self.listener.close()
        self.store = None


def meet(
    init: GlooInit,
    place: RankAssignment,
    point: MeetingPoint | None,
    greeting: str,
    silence_s: float,
) -> tuple[EntryBarrier, Any]:
    """Waits until all ends of a communicator are there.

    Args:
        init: the sender's params.
        place: this end's rank.
        point: where they meet, in the sender; None in a receiver.
        greeting: what the other ends get from this one, after its host's name and its pid.
        silence_s: as of :class:`bus._weight_transfer.entry_barrier.EntryBarrier`.

    Returns:
        The barrier, and the communicator's part of the store.

    Raises:
        OSError: nobody listens there.
        RuntimeError: the trainer's end went away, or an end did not come within
            ``init.timeout_ms``.
    """
    timeout_s = init.timeout_ms / 1000
    greeting = f"{socket.gethostname()}:{os.getpid()} {greeting}"
    if point is None:
        address = (init.host, init.barrier_port)
        barrier = barrier_links.connect(
            address, init.token, place, greeting, timeout_s=timeout_s, silence_s=silence_s
        )
    else:
        barrier = point.listener.meet(place, greeting, timeout_s=timeout_s, silence_s=silence_s)
    try:
        return barrier, connect_store(init.host, init.port, place.communicator, timeout_s)
    except BaseException:
        barrier.close()
        raise


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


def reason(error: Exception) -> str:
    """Returns torch's text of an error, without source file, guesses and C++ stack.

    Of an error of NCCL, it is NCCL's own last line.

    Args:
        error: what torch has raised.
    """
    last = str(error).partition("Last error:")[2]
    lines = (last.strip() or str(error).strip()).splitlines()
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
