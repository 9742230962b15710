"""Holds the broker's groups by name: made for the first peer, removed after the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus._protocol.core.access import outside_bounds
from bus._protocol.core.failures import Failure
from bus._protocol.core.membership import WATCHERS
from bus._protocol.group.catch_up import GroupVersion
from bus._protocol.group.group import Group
from bus.messages import NackCode

if TYPE_CHECKING:
    from bus._protocol.core.config import BrokerConfig
    from bus._protocol.core.membership import Membership
    from bus.messages import Envelope, Join

# A group without peers is removed after GROUP_KEPT_MS; at once if there are more than this.
GROUP_KEPT_MS: Final = 60_000.0
MAX_GROUPS: Final = 1024


class GroupTable(dict[str, Group]):
    """Holds all groups of the broker, by name.

    The epoch and version of a removed group are kept, because they may only grow.
    """

    def __init__(self, config: BrokerConfig, peers: Membership) -> None:
        super().__init__()
        self._config = config
        self._peers = peers
        self._unused_ms: dict[str, float] = {}  # groups without peers, since when
        self._forgotten: dict[str, tuple[int, GroupVersion]] = {}  # of removed groups

    def get_or_make(self, name: str) -> Group:
        """Returns the group of that name; makes a new one if there is none."""
        group = self.get(name)
        if group is None:
            group = self[name] = Group(name, self._config)
            if name in self._forgotten:
                group.session.epoch, group.served = self._forgotten.pop(name)
        return group

    def refuse_more(self, envelope: Envelope, join: Join, now_ms: float) -> Failure | None:
        """Returns why a JOIN exceeds a limit of epoch, version or groups; None: it fits.

        A removed group keeps its epoch and version; those of an unknown group are 0.
        """
        name, group = envelope.group, self.get(envelope.group)
        epoch, served = self._forgotten.get(name, (0, GroupVersion()))
        version = served.value
        if group is not None:
            epoch, version = group.epoch, group.version
        refused = outside_bounds("epoch", envelope.epoch, epoch)
        if join.engine is not None:
            refused = refused or outside_bounds("version", join.engine.version, version)
        if refused or group is not None or len(self) < MAX_GROUPS:
            return refused
        self.drop_unused(now_ms, kept_ms=0.0)
        if len(self) < MAX_GROUPS:
            return None
        detail = f"the broker holds {len(self)} groups, and no more"
        hint = "join one of these groups, or wait until one has no peers"
        return Failure(NackCode.RATE_LIMITED, detail, field="group", hint=hint)

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
