"""The admission state of an engine: whether it accepts new requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """Records whether an engine accepts new requests, or rejects them.

    Attributes:
        closed: admission is closed, as far as the sidecar knows.
        unconfirmed: the last attempt to close admission failed, so it may be open.
        version: the version that the engine serves.
        group_version: the version that the group serves, as the broker last said. If ``version`` is
            older, the engine is stale, and its resume leaves admission closed.
    """

    closed: bool = False
    unconfirmed: bool = False
    version: int = 0
    group_version: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the engine serves an older version than its group."""
        return self.version < self.group_version
