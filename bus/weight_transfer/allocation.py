"""What a transfer is given: its ranks in a communicator, and memory to stage in.

The protocol's machines and the engines pass these values on. The module knows no backend and no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bus.errors import EngineError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.messages import Staging


@dataclass(frozen=True, slots=True)
class World:
    """What a sender needs to know of the communicator that it makes; it is rank 0.

    ``number`` is 0 and ``size`` 1 for a backend without collectives. ``address`` is this
    host's, as those see it who are reached the way that the broker is. ``senders``: so many
    ranks of the trainer take part, in the first places; the broker counts one, and ``size`` all.
    """

    number: int
    size: int
    address: str
    senders: int = 1


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Where an engine stands in a communicator. ``rank`` is its first worker's, and each
    worker's own where a receiver gets it."""

    communicator: int
    world_size: int
    rank: int

    def of_worker(self, index: int) -> RankAssignment:
        """The place of an engine's worker."""
        return RankAssignment(self.communicator, self.world_size, self.rank + index)


# Of a backend without collectives.
ALONE: Final = World(0, 1, "")
NO_RANK: Final = RankAssignment(0, 1, 0)


@dataclass(frozen=True, slots=True)
class StagingCapacity:
    """For an update that is armed.

    Attributes:
        needed_bytes: what staging takes, in the worker that needs most; 0 if that is not known.
        why_not: why there can be none; empty: there can.
    """

    needed_bytes: int = 0
    why_not: str = ""


def combine(rooms: Sequence[StagingCapacity]) -> StagingCapacity:
    """Of an engine's workers: what it takes in the one that needs most, and why the first one can't
    that can't.

    Raises:
        ValueError: there are none.
    """
    return StagingCapacity(
        max(room.needed_bytes for room in rooms),
        next((room.why_not for room in rooms if room.why_not), ""),
    )


def require_capacity(staging: Staging, room: StagingCapacity) -> StagingCapacity:
    """The same room, unless there is none, and there must be.

    Raises:
        EngineError: code ``staging_refused``.
    """
    if room.why_not and staging.required:
        raise EngineError(room.why_not, code=NackCode.STAGING_REFUSED)
    return room
