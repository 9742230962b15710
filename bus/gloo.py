"""One end of a gloo communicator, the same on both sides.

The bus has no torch: whoever has it hands ``torch.distributed`` in.
"""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from bus.transfer import GlooInit, Place

# Sends nothing, and any port will do: it only asks the system for the way there.
_ANY_PORT: Final = 9
# The trainer's store listens before anybody hears of it.
_CONNECT_S: Final = 5.0


def reason(error: Exception) -> str:
    """What gloo says of an error, without its source file, its guesses and the stack of C++."""
    lines = str(error).strip().splitlines()
    told = re.sub(r"^\[\S+:\d+\]\s*", "", lines[0].strip()) if lines else ""
    return told.split(". This is typically", 1)[0] or type(error).__name__


def join(dist: Any, init: GlooInit, place: Place) -> Any:
    """The process group, when all have joined it.

    Raises:
        OSError: the store is not there.
        RuntimeError: it went away, or not everybody came within ``init.timeout_ms``.
    """
    timeout = timedelta(milliseconds=init.timeout_ms)
    # A TCPStore goes on asking for one that isn't there until its timeout, and that must be
    # long: both ends ask the DNS for the other's name, which takes 5 s where no answer comes.
    with socket.create_connection((init.host, init.port), timeout=_CONNECT_S):
        pass
    store = dist.TCPStore(init.host, init.port, is_master=False, timeout=timeout)
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - there is no other way to the device
    options._timeout = timeout  # noqa: SLF001
    here = address_towards(init.host)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]  # noqa: SLF001
    named = dist.PrefixStore(f"wavebus-{place.communicator}", store)
    return dist.ProcessGroupGloo(named, place.rank, place.world_size, options)


def broadcast(dist: Any, group: Any, memory: Any) -> None:
    """From rank 0 to all; returns when this end has done its part.

    Raises:
        RuntimeError: an end is gone, or was silent for longer than the group's timeout.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([memory], options).wait()


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
