"""The broker's groups by name: made for the first peer, removed after the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import NackCode
from bus.protocol.broker.config import GROUP_KEPT_MS, LEASE_PER_PEER_TIMEOUT, MAX_GROUPS
from bus.protocol.core.failures import Failure
from bus.protocol.core.membership import WATCHERS
from bus.protocol.group.catch_up import GroupVersion
from bus.protocol.group.group import Group

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.protocol.broker.config import BrokerConfig
    from bus.protocol.core.effects import Effect
    from bus.protocol.core.membership import Membership


class GroupTable(dict[str, Group]):
    """Holds all groups of the broker, by name.

    The epoch and version of a removed group are kept, because they may only grow.

    Attributes:
        due_ms: when the next tick is due, at the latest.
    """

    def __init__(self, config: BrokerConfig, peers: Membership) -> None:
        super().__init__()
        self._config = config
        self._peers = peers
        self.due_ms = 0.0
        self._unused_ms: dict[str, float] = {}  # groups without peers, since when
        self._forgotten: dict[str, tuple[int, GroupVersion]] = {}  # of removed groups

    def numbers(self, name: str) -> tuple[int, int]:
        """Returns the epoch and version of the named group, even if removed; zeros if unknown."""
        group = self.get(name)
        if group is not None:
            return group.epoch, group.version
        epoch, served = self._forgotten.get(name, (0, GroupVersion()))
        return epoch, served.value

    def get_or_make(self, name: str) -> Group:
        """Returns the group of that name; makes it if there is none."""
        group = self.get(name)
        if group is None:
            config = self._config
            group = self[name] = Group(
                name,
                retry_ms=config.retry_ms,
                step_timeout_ms=config.step_timeout_ms,
                min_lease_ms=config.peer_timeout_ms * LEASE_PER_PEER_TIMEOUT,
                hold_ms=config.heartbeat_ms,
            )
            if name in self._forgotten:
                group.session.epoch, group.served = self._forgotten.pop(name)
        return group

    def refuse_more(self, name: str, now_ms: float) -> Failure | None:
        """Returns why the group can't be made: there are too many groups.

        None: it exists or can be made.
        """
        if name not in self and len(self) >= MAX_GROUPS:
            self.drop_unused(now_ms, kept_ms=0.0)
            if len(self) >= MAX_GROUPS:
                detail = f"there are {len(self)} groups"
                return Failure(NackCode.RATE_LIMITED, detail, field="group")
        return None

    def drop_unused(self, now_ms: float, kept_ms: float = GROUP_KEPT_MS) -> None:
        """Removes the groups that have had no peer for ``kept_ms``."""
        used = {peer.group for peer in self._peers if peer.role not in WATCHERS}
        self._unused_ms = {n: self._unused_ms.get(n, now_ms) for n in self.keys() - used}
        for name, since_ms in sorted(self._unused_ms.items()):
            if now_ms >= since_ms + kept_ms:
                group = self.pop(name)
                if group.epoch or group.version:
                    self._forgotten[name] = (group.epoch, group.served)
        while len(self._forgotten) > MAX_GROUPS:
            del self._forgotten[next(iter(self._forgotten))]

    def review(self, names: Iterable[str], effects: list[Effect], now_ms: float) -> list[Effect]:
        """Handles what a frame or a tick changed in the routes of these groups.

        Watchers get the new routes. While a group waits for a watcher's confirmation, its messages
        to engines that left the routes are held. The next tick may be due earlier.

        Args:
            names: the groups that may have changed.
            effects: the effects so far.
            now_ms: the time.

        Returns:
            The effects without the held messages, and with those for watchers.
        """
        for group in (self[name] for name in names if name in self):
            rerouted = group.reroute(self._watchers, now_ms)
            if group.routing.is_holding:
                effects = group.routing.hold(effects)
            effects = effects + rerouted
            due_ms = group.next_deadline_ms()
            if due_ms is not None and due_ms < self.due_ms:
                self.due_ms = due_ms
        return effects

    def remove_watcher(self, watcher: bytes) -> list[Effect]:
        """Removes a watcher that has left, so that no group waits for its confirmation."""
        return [e for each in self.values() for e in each.routing.remove_watchers((watcher,))]

    def _watchers(self) -> tuple[bytes, ...]:
        return tuple(peer.route for peer in self._peers if peer.role in WATCHERS)
