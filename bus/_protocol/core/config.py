"""The broker's configuration: its timeouts, its limits, and its name on the bus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from bus._protocol.core.access import Limits

BROKER_NAME: Final = "broker"


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The broker's times, in milliseconds, and its limits.

    Attributes:
        heartbeat_ms: how often each peer sends a heartbeat.
        peer_timeout_ms: the silence after which a peer is lost.
        retry_ms: how often a request is repeated to engines that have not answered.
        step_timeout_ms: how long a live engine may take for one step of an update or pause.
        limits: how many frames peers may send.
    """

    heartbeat_ms: int = 1000
    peer_timeout_ms: int = 5000
    retry_ms: int = 1000
    step_timeout_ms: int = 300_000
    limits: Limits = field(default_factory=Limits)

    @property
    def min_lease_ms(self) -> int:
        """The shortest lease that a pause may ask for, in ms.

        A pause must outlive the time to detect a lost peer, or an engine could run again while its
        group still counts it as paused.
        """
        return min_lease_ms(self.peer_timeout_ms)


def min_lease_ms(peer_timeout_ms: int) -> int:
    """Returns the shortest lease at a broker with this peer timeout, in ms."""
    return 2 * peer_timeout_ms
