"""Options of one rank in a data parallel group of embedded engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus._ids import check_name
from bus.errors import UsageError
from sidecar._embedded.parallel.waves import DEFAULT_INTERVAL

if TYPE_CHECKING:
    from sidecar._dp_coordinator.process import DpCoordinatorAddresses

_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class DataParallel:
    """One rank of a data parallel group of embedded engines.

    Args:
        size: how many ranks there are; at least 2.
        rank: this rank, from 0.
        master: ``host:port`` at which the ranks meet. Rank 0 listens there.
        group: the DP group's name on the bus.
        coordinator: addresses of the DP coordinator, which rank 0 sends to the others. None: rank 0
            starts one.
        broker: the broker's address, for a DP coordinator that rank 0 starts; empty: none.
        bus_group: the group on the bus that the DP group belongs to.
        sync_interval: steps between two agreements about the wave's end; equal on all ranks.
        join_timeout_s: how long the ranks wait for each other at the start, in seconds.

    Raises:
        UsageError: a field is wrong. The text names the field.
    """

    size: int
    rank: int
    master: str
    group: str
    coordinator: DpCoordinatorAddresses | None = None
    broker: str = ""
    bus_group: str = "policy"
    sync_interval: int = DEFAULT_INTERVAL
    join_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.size < 2:  # noqa: PLR2004 - one rank is no group
            raise UsageError(f"dp_size={self.size}: a data parallel group has at least 2 ranks")
        if not 0 <= self.rank < self.size:
            raise UsageError(f"dp_rank={self.rank}: must be 0 to {self.size - 1}")
        if self.sync_interval < 1:
            raise UsageError(f"sync_interval={self.sync_interval}: must be at least 1")
        check_name(self.group, "dp_group")
        _ = self.address

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which the ranks meet.

        Raises:
            UsageError: ``master`` is no ``host:port``.
        """
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= _MAX_PORT:
            raise UsageError(f"dp_master={self.master!r}: must be host:port")
        return host.strip("[]"), int(port)
