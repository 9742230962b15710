"""One end of a gloo communicator, the same on both sides.

The bus has no torch: whoever has it hands ``torch.distributed`` in.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bus import rendezvous

if TYPE_CHECKING:
    from bus.transfer import GlooInit, Place


def join(dist: Any, init: GlooInit, place: Place) -> Any:
    """The process group, when all have joined it.

    Raises:
        OSError: the store is not there.
        RuntimeError: it went away, or not everybody came within ``init.timeout_ms``.
    """
    store = rendezvous.enter(dist, init.host, init.port, place.communicator, init.timeout_ms / 1000)
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - there is no other way to the device
    options._timeout = timedelta(milliseconds=init.timeout_ms)  # noqa: SLF001
    here = rendezvous.address_towards(init.host)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]  # noqa: SLF001
    return dist.ProcessGroupGloo(store, place.rank, place.world_size, options)


def broadcast(dist: Any, group: Any, memory: Any) -> None:
    """From rank 0 to all; returns when this end has done its part.

    Raises:
        RuntimeError: an end is gone, or was silent for longer than the group's timeout.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([memory], options).wait()
