"""Which engines of a group requests are to be sent to.

An engine is routable if it serves the group's version, all of it, awake, with all ranks of its DP
group. In a pause it is still: its requests wait. But who was behind, or quarantined, is not before
it is resumed: until then its admission is closed, and ends what comes. Nor is who says that it is:
as an engine that was behind, of which a new broker knows no more than that. Nor is who is overdue
with a step, before it has answered. While a commit is under
way nothing changes, so that routers see it as one: who has committed, and nobody else. While one is
given up, nobody comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus.messages import Route, Routes
from bus.protocol.group.update import UpdateState

if TYPE_CHECKING:
    from bus.messages import Phase
    from bus.protocol.group.engine_registry import EngineRegistry
    from bus.protocol.group.update import UpdateMachine

_OUT: Final[frozenset[Phase]] = frozenset(
    {"asleep", "weights_discarded", "quarantined", "pause_unknown"}
)


class Routing:
    """One group's. ``now`` is what was told last."""

    def __init__(self, registry: EngineRegistry, update: UpdateMachine) -> None:
        self.now = Routes(0, ())
        self._registry = registry
        self._update = update
        self._seen = (-1, -1)

    def changed(self, version: int) -> Routes | None:
        """The routable engines, if they are others than before; ``version``: the group's."""
        seen = (self._registry.changes, version)
        if seen == self._seen or self._update.state is UpdateState.COMMITTING:
            return None
        self._seen = seen
        routable = self._routable(version)
        if self._update.state is UpdateState.ABORTING:  # what some have loaded, is to be heard yet
            before = {route.engine for route in self.now.engines}
            routable = tuple(route for route in routable if route.engine in before)
        routes = Routes(version, routable)
        if routes == self.now:
            return None
        self.now = routes
        return routes

    def _routable(self, version: int) -> tuple[Route, ...]:
        registry = self._registry
        out = {
            rank_peer
            for name, peer in registry.engines.items()
            if peer.version != version
            or peer.phase in _OUT
            or name in registry.quarantined
            or peer.overdue
            or registry.is_not_admitting(name)
            for rank_peer in registry.dp_peers(name)
        }
        return tuple(
            Route(
                name,
                peer.facts.dp_group,
                peer.facts.endpoint,
                peer.facts.limits,
                peer.facts.pd_role,
            )
            for name, peer in sorted(registry.engines.items())
            if name not in out and not registry.is_incomplete(name) and peer.facts is not None
        )
