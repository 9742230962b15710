"""Shows on the bus that an engine boots: until it serves, it can't join as one."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from bus.ids import BOOT_SUFFIX, new_boot
from bus.keys import security
from bus.messages import Heartbeat, Join
from bus.runtime.clock import AsyncioScheduler
from bus.runtime.peer import HOST, PeerClient, route_of
from bus.runtime.zmq_transport import ZmqClient

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def shown_as_booting(broker: str, group: str, name: str) -> Iterator[None]:
    """For the length of a block `wavebus status` says that engine ``name`` boots."""
    own = name[: 128 - len(BOOT_SUFFIX)] + BOOT_SUFFIX
    peer = PeerClient(
        name=own,
        group=group,
        transport=ZmqClient(broker, route_of(own, new_boot()), security()),
        scheduler=AsyncioScheduler(),
        join=lambda: Join("booting", HOST, os.getpid(), None, None),
        beat=lambda: Heartbeat("running", 0, 0, ""),
        on_message=lambda _envelope, _message: None,
    )
    peer.start()
    try:
        yield
    finally:
        peer.close("it boots no more")
