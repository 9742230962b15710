"""Keeps a watcher's copy of the routes, from ROUTES and ROUTES_CHANGE messages.

Invariant: :meth:`FollowedRoutes.receive` returns the routes of one revision of the present broker.
A change applies only to the revision before it. If that revision was lost, or is of another broker,
all routes are requested, and nothing is returned until they have arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import Routes, RoutesChange, RoutesRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Envelope, Message


class FollowedRoutes:
    """Keeps the routes of all groups that a watcher receives."""

    def __init__(self, send: Callable[[RoutesRequest], object]) -> None:
        self._send = send
        self._boot = 0  # of the broker that has sent the routes
        self._groups: dict[str, Routes] = {}

    def receive(self, envelope: Envelope, message: Message) -> Routes | None:
        """Returns the new routes of the envelope's group, if the message brings or changes them."""
        if not isinstance(message, Routes | RoutesChange):
            return None
        if envelope.boot != self._boot:
            self._boot = envelope.boot
            self._groups.clear()
        if isinstance(message, RoutesChange):
            before = self._groups.get(envelope.group, Routes(0, ()))
            if message.revision != before.revision + 1:
                self._send(RoutesRequest(envelope.group))
                return None
            message = _changed(before, message)
        self._groups[envelope.group] = message
        return message


def _changed(routes: Routes, change: RoutesChange) -> Routes:
    """Returns the routes with a change, in the order of the engines' names."""
    engines = {each.engine: each for each in routes.engines}
    engines.update((each.engine, each) for each in change.came)
    for name in change.gone:
        engines.pop(name, None)
    ordered = tuple(route for _, route in sorted(engines.items()))
    return Routes(change.version, ordered, change.revision)
