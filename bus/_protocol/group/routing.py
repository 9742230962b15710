"""Decides which engines of a group are routable, so that requests are sent to them.

An engine is routable if it serves the group's version, with whole weights, awake, with all ranks of
its DP group. It stays routable in a pause: its requests wait. An engine is not routable

- if it was stale or quarantined, until it is resumed: its admission is closed until then,
- if it says that its admission is closed, which is all that a new broker knows of a stale engine,
- if it is overdue with a step, until it has answered.

During a commit nothing changes, so that routers see the commit as one change; then exactly the
engines that committed are routable. During an abort no engine becomes routable.

Routes are computed when something has changed that they depend on. What may be skipped, and why:

- If nothing has been marked since the last time (:attr:`EngineRegistry.changes` and ``additions``,
  the version, the sleep, an abort), the routes are the same.
- If only ``additions`` are marked, no engine may have to leave, and a new one may wait: in a group
  of more than :data:`SETTLES_ABOVE` engines, routes are computed at most once in
  :data:`SETTLE_MS`. The first addition after a while is not delayed; no addition is delayed for
  longer. With a thousand engines that join at once, each would otherwise compute and send the
  routes of all others.
- An engine that may have to leave is never held back: ``changes`` are computed at once.

Watchers get the whole routes when they join, and then each change alone (ROUTES_CHANGE).

Messages of the broker make an engine close admission, sleep or end. A watcher that forwards
requests to engines may ask to be notified first: it confirms each change of the routes by
ROUTES_TAKEN. Then the broker's messages to an engine that leaves the routes are held::

    state   event                            next    effect
    PASSED  it leaves the routes, and some   HELD    ROUTES; messages to it are kept
            watcher confirms changes
    HELD    it leaves them again             HELD    ROUTES; the later revision counts
    HELD    every watcher that confirms has  PASSED  what was kept is sent, in order
            confirmed it, or has left
    HELD    ``hold_ms`` are over             PASSED  the same; late watchers are ignored until they
                                                     confirm again

Invariants: while no watcher confirms, no message is held; none is held for longer than ``hold_ms``;
an engine gets all its messages in order; only engines that have left the routes are held, so the
steps of others continue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from bus._protocol.core.effects import Send
from bus._protocol.group.engine_registry import UNROUTABLE
from bus._protocol.group.sleep import SleepState
from bus._protocol.group.update import UpdateState
from bus.messages import Route, Routes, RoutesChange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.core.effects import Effect
    from bus._protocol.core.membership import Peer
    from bus._protocol.group.engine_registry import EngineRegistry
    from bus._protocol.group.sleep import SleepMachine
    from bus._protocol.group.update import UpdateMachine


# How long an engine that becomes routable may wait for others, so that watchers get one change.
SETTLE_MS: Final = 100.0
# Groups of at most so many engines announce each addition at once.
SETTLES_ABOVE: Final = 16


@dataclass(slots=True)
class _Held:
    """Messages to one engine that wait until ``revision`` is confirmed, or until ``until_ms``."""

    engine: Peer
    revision: int
    until_ms: float
    sends: list[Send] = field(default_factory=list)


class Routing:
    """Decides one group's routes, and holds messages to engines that leave the routes.

    Args:
        hold_ms: how long the broker waits for watchers, in ms.

    Attributes:
        now: the routes that were announced last.
        added: the ``additions`` that they have.
        computed: how often the routes of all engines were computed.
    """

    def __init__(
        self, registry: EngineRegistry, update: UpdateMachine, sleep: SleepMachine, hold_ms: float
    ) -> None:
        self.now = Routes(0, ())
        self.computed = 0
        self._registry = registry
        self._update = update
        self._sleep = sleep
        self._hold_ms = hold_ms
        self._seen: tuple[object, ...] = ()
        self.added = 0
        self._settled_ms = 0.0  # when further additions may be computed
        self._confirmed: dict[str, int] = {}  # watchers' last revisions, by name
        self._held: dict[str, _Held] = {}  # by the engine's name

    def changed(self, version: int, now_ms: float) -> RoutesChange | None:
        """Returns how the routes have changed, or None; ``version`` is the group's."""
        if self._update.state is UpdateState.COMMITTING or self.is_current(version):
            return None
        inputs = self._inputs(version)
        if inputs == self._seen and now_ms < self._settled_ms:
            return None
        self._seen, self.added = inputs, self._registry.additions
        is_large = len(self._registry.engines) > SETTLES_ABOVE
        self._settled_ms = now_ms + SETTLE_MS if is_large else 0.0
        self.computed += 1
        before = {route.engine: route for route in self.now.engines}
        routable = self._routable(version)
        if self._update.state is UpdateState.ABORTING:  # not all have reported what they loaded
            routable = tuple(route for route in routable if route.engine in before)
        came = tuple(route for route in routable if before.pop(route.engine, None) != route)
        if not (came or before) and version == self.now.version:
            return None
        self.now = Routes(version, routable, self.now.revision + 1)
        for name in before.keys() & self._registry.engines.keys() if self._confirmed else ():
            held = _Held(self._registry.engines[name], 0, now_ms + self._hold_ms)
            self._held.setdefault(name, held).revision = self.now.revision
        return RoutesChange(version, self.now.revision, came, tuple(sorted(before)))

    def is_current(self, version: int) -> bool:
        """Whether the routes are up to date with the group; ``version`` is the group's."""
        return self._seen == self._inputs(version) and self.added == self._registry.additions

    def _inputs(self, version: int) -> tuple[object, ...]:
        aborting = self._update.state is UpdateState.ABORTING
        return (self._registry.changes, version, self._sleep.state, aborting)

    def keeps(self, name: str) -> bool:
        """Whether this engine is in the routes and a commit is running.

        If so, callers leave it in the routes until the commit is over, whatever it reports.
        """
        in_commit = self._update.state is UpdateState.COMMITTING
        return in_commit and any(route.engine == name for route in self.now.engines)

    # -- held messages -----------------------------------------------------------

    @property
    def is_holding(self) -> bool:
        """Whether messages to an engine are held."""
        return bool(self._held)

    @property
    def due_ms(self) -> float | None:
        """When :meth:`expire` or :meth:`changed` is due; None: no message or addition waits."""
        times = [each.until_ms for each in self._held.values()]
        is_late = self.added != self._registry.additions
        if is_late and self._update.state is not UpdateState.COMMITTING:
            times.append(self._settled_ms)
        return min(times, default=None)

    def hold(self, effects: list[Effect]) -> list[Effect]:
        """Keeps the messages to engines whose messages are held, and returns all other effects."""
        self._follow_engines()
        held = {each.engine.route: each for each in self._held.values()}
        passed: list[Effect] = []
        for effect in effects:
            if not isinstance(effect, Send) or held.keys().isdisjoint(effect.routes):
                passed.append(effect)
                continue
            for route in effect.routes:
                if route in held:
                    held[route].sends.append(effect)
            rest = tuple(route for route in effect.routes if route not in held)
            passed += [replace(effect, routes=rest)] if rest else []
        return passed

    def on_taken(self, watcher: str, revision: int) -> list[Effect]:
        """Records a watcher's confirmation, and returns the messages that are released.

        A revision of an earlier broker confirms nothing.
        """
        self._confirmed[watcher] = revision if revision <= self.now.revision else -1
        return self._release()

    def remove_watchers(self, watchers: Iterable[str]) -> list[Effect]:
        """Stops waiting for these watchers, and returns the messages that are released."""
        for watcher in watchers:
            self._confirmed.pop(watcher, None)
        return self._release()

    def expire(self, now_ms: float) -> tuple[list[str], list[Effect]]:
        """Releases messages held for too long; returns the late watchers and these messages."""
        over = [each.revision for each in self._held.values() if now_ms >= each.until_ms]
        late = [w for w, taken in self._confirmed.items() if taken < max(over, default=-1)]
        return late, self.remove_watchers(late)

    def _release(self) -> list[Effect]:
        self._follow_engines()
        taken = min(self._confirmed.values(), default=self.now.revision)
        released = [name for name, held in self._held.items() if held.revision <= taken]
        effects: list[Effect] = []
        for held in map(self._held.pop, released):
            effects += [replace(each, routes=(held.engine.route,)) for each in held.sends]
        return effects

    def _follow_engines(self) -> None:
        """Takes over the new routes of engines that have joined again meanwhile."""
        for name, held in self._held.items():
            now = self._registry.engines.get(name, held.engine)
            if now.boot == held.engine.boot:
                held.engine = now

    def _routable(self, version: int) -> tuple[Route, ...]:
        registry = self._registry
        out = {
            rank_peer
            for name, peer in registry.engines.items()
            if peer.version != version
            or peer.phase in UNROUTABLE
            or registry.is_quarantined(name)
            or peer.overdue
            or registry.is_not_admitting(name)
            or (self._sleep.state is SleepState.FALLING and name in self._sleep.members)
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
