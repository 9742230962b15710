"""Whether an engine admits new requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """Whether an engine takes requests, or ends at once what reaches it.

    Attributes:
        closed: it is, for all that is known.
        unconfirmed: closing it has failed.
        version: the weight version that the engine serves.
        group_version: the one that its group does, as the broker has said last. Who is behind it
            is not to serve: its resume leaves admission closed.
    """

    closed: bool = False
    unconfirmed: bool = False
    version: int = 0
    group_version: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the engine serves an older version than its group."""
        return self.version < self.group_version
