"""Describes the ranks of a communicator, and whether memory allows staging.

State machines and engines pass these values on. The module depends on no backend and loads no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bus.errors import EngineError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bus.messages import Staging


@dataclass(frozen=True, slots=True)
class World:
    """Describes a communicator to the sender, which is rank 0 in it.

    Attributes:
        number: the communicator's number; 0 for a backend without collectives.
        size: how many ranks there are, with the sender; 1 without collectives.
        address: this host's address on the network towards the broker.
        senders: how many ranks of the trainer take part. They are the first ranks.
        ports: the ports of this host at which the other ends connect to this one: of torch's store,
            and of the entry barrier; 0: any free port.
        first_ranks: the rank of each engine's first worker.
    """

    number: int
    size: int
    address: str
    senders: int = 1
    ports: tuple[int, int] = (0, 0)
    first_ranks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Says which rank an engine, or one of its workers, is in a communicator.

    Attributes:
        communicator: the communicator's number.
        world_size: how many ranks there are.
        rank: the rank of the engine's first worker. A receiver gets its own worker's rank.
    """

    communicator: int
    world_size: int
    rank: int

    def of_worker(self, index: int) -> RankAssignment:
        """Returns the assignment of one of the engine's workers.

        Args:
            index: the worker's number in the engine, from 0.
        """
        return RankAssignment(self.communicator, self.world_size, self.rank + index)


# For backends without collectives.
ALONE: Final = World(0, 1, "")
NO_RANK: Final = RankAssignment(0, 1, 0)


@dataclass(frozen=True, slots=True)
class StagingCapacity:
    """Whether an armed update can be staged, and how much memory that takes.

    Attributes:
        needed_bytes: the memory that staging takes in the worker that needs most, in bytes; 0 if
            unknown.
        why_not: why the update can't be staged; empty if it can.
    """

    needed_bytes: int = 0
    why_not: str = ""


def combine(rooms: Sequence[StagingCapacity]) -> StagingCapacity:
    """Combines the capacities of an engine's workers.

    Returns:
        The largest need, and the first reason why an update can't be staged.

    Raises:
        ValueError: ``rooms`` is empty.
    """
    return StagingCapacity(
        max(room.needed_bytes for room in rooms),
        next((room.why_not for room in rooms if room.why_not), ""),
    )


def require_capacity(staging: Staging, room: StagingCapacity) -> StagingCapacity:
    """Returns ``room``; raises if the update must be staged and can't be.

    Raises:
        EngineError: code ``staging_refused``, with the reason.
    """
    if room.why_not and staging.required:
        raise EngineError(room.why_not, code=NackCode.STAGING_REFUSED)
    return room
