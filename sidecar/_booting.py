"""Announces on the bus that an engine is booting, before its sidecar can join."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bus._ids import BOOT_SUFFIX
from bus._keys import security
from bus._runtime.peer import PeerClient

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def shown_as_booting(broker: str, group: str, name: str) -> Iterator[None]:
    """Keeps a booting engine visible on the bus while the block runs.

    A large model takes minutes to load, and its sidecar joins only afterwards. Until then a
    separate peer represents the engine in the broker's status.

    Args:
        group: the group that the engine will join.
        name: the name that the engine will have; the separate peer's name adds a suffix to it.
    """
    peer = PeerClient(
        name=name[: 128 - len(BOOT_SUFFIX)] + BOOT_SUFFIX,
        group=group,
        role="booting",
        broker=broker,
        security=security(),
        on_message=lambda _envelope, _message: None,
    )
    peer.start()
    try:
        yield
    finally:
        peer.close("its boot has ended")
