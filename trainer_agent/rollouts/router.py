"""Which engine a request goes to. No I/O, and no clock but the times it is given, in seconds.

========================  ===================================================================
a request                 goes to
========================  ===================================================================
of a session              the engine that served the session last, while that is routed
of a new session          by rendezvous hashing: the engine of the highest score that has at
                          most 1.25 times the mean of sessions
of no session             the least loaded engine
========================  ===================================================================

A prefill engine is none of these while any other engine is routed. It computes the prompts of
requests that decode engines have (:meth:`Router.pick_prefill`).

Invariants: at most ``window`` sequences are in flight on an engine, unless one request alone has
more; a window is at least one and at most the engine's slots; it halves by rejections and while
requests wait in the engine, and grows by completions: by one each up to its goal, and by one in all
for a window's worth of them beyond; a session moves only when its engine leaves
the routes, or its request must avoid it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bus.messages import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from bus.messages import EngineView, Route

_SESSIONS_KEPT: Final = 100_000
_LOAD_BOUND: Final = 1.25
_UNKNOWN_SLOTS: Final = 256
_HOLD_S: Final = 0.05
_LONGEST_HOLD_S: Final = 1.0
# An engine that was closed or paused for a while takes as many as before. One in which requests
# waited had too many: as many again would be preempted again.
_AFTER_REJECTION: Final = 1.0
_AFTER_QUEUE: Final = 0.75
_PEAKS: Final = 3  # figures kept; what an engine counted may be so many of them old


@dataclass(slots=True)
class EngineLoad:
    """A routed engine, and what is on it: ``in_flight`` sequences of ours, and ``others``.

    ``window``: how many of ours may be. No request is sent to it before ``held_until_s``;
    ``hold_s``: how long the next hold is. ``peaks``: the most of ours that were in flight since the
    last figures, and before each of those; ``queued``: how many requests it had by the last
    figures, if some of them waited; 0 if none did. ``goal``: up to which the window grows fast.
    """

    route: Route
    window: float
    in_flight: int = 0
    held_until_s: float = 0.0
    hold_s: float = _HOLD_S
    others: int = 0
    peaks: tuple[int, ...] = (0,)
    queued: int = 0
    goal: float = 0.0

    @property
    def slots(self) -> int:
        return self.route.limits.slots or _UNKNOWN_SLOTS

    @property
    def fill(self) -> float:
        """Which part of its slots is in use."""
        return (self.in_flight + self.others) / self.slots

    def has_room(self, sequences: int, now_s: float) -> bool:
        """Whether so many more may be sent to it now."""
        fits = not self.in_flight or self.in_flight + sequences <= self.window
        return fits and now_s >= self.held_until_s

    def halve_window(self, regained: float) -> None:
        """Send half as many; completions soon bring back the ``regained`` part of what it was."""
        self.goal = regained * max(self.window, self.goal)
        self.window = max(1.0, self.window / 2)


class Router:
    """The engines of one group, from ROUTES, and the sessions that they serve."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineLoad] = {}
        # By engine and endpoint: the routed ones, and those with requests of ours.
        self._loads: dict[tuple[str, str], EngineLoad] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()  # the least recently used first
        self._count: Counter[str] = Counter()  # sessions of each engine

    def update(self, routes: Iterable[Route]) -> None:
        """Take the engines that are routed now."""
        now: dict[str, EngineLoad] = {}
        for route in routes:
            if not route.endpoint:
                continue
            key = route.engine, route.endpoint
            load = self._loads.setdefault(
                key, EngineLoad(route, float(route.limits.slots or _UNKNOWN_SLOTS))
            )
            if route.engine not in self.engines:
                load.held_until_s = 0.0  # it is back
            load.route = route
            now[route.engine] = load
        self.engines = now
        kept = self._loads.items()
        self._loads = {key: e for key, e in kept if e.in_flight or now.get(key[0]) is e}

    def limits(self) -> RequestLimits:
        """What all of them take; what none reports is 0."""
        all_of = [load.route.limits for load in self.engines.values()]

        def least(values: Iterable[int]) -> int:
            return min((value for value in values if value), default=0)

        return RequestLimits(
            vocab_size=least(each.vocab_size for each in all_of),
            max_model_len=least(each.max_model_len for each in all_of),
            slots=least(each.slots for each in all_of),
            exact_seeds=all(each.exact_seeds for each in all_of),
        )

    def take_figures(self, engines: Iterable[EngineView]) -> None:
        """How many requests engines have in all, as far as the broker has heard; what it does not
        name, or did not know of late, counts as ours alone.

        An engine that queues by figures twice in a row, though it has no more than before, does so
        for want of slots or memory; where more have come, they wait for its next step.
        """
        known = {(each.name, each.endpoint): each for each in engines}
        for key, load in self._loads.items():
            view = known.get(key)
            total, waiting = (view.in_flight, view.waiting) if view is not None else (0, 0)
            load.others = max(0, total - max(load.peaks))
            load.peaks = (load.in_flight, *load.peaks[:_PEAKS])
            queued, load.queued = load.queued, total if waiting else 0
            if 0 < load.queued <= queued:
                load.halve_window(_AFTER_QUEUE)

    def pick(
        self, session: str | None, sequences: int, now_s: float, avoid: Collection[str] = ()
    ) -> EngineLoad | None:
        """The engine to send a request of so many sequences to, which count as in flight there
        until :meth:`release`; None if it must wait. ``avoid``: engines that failed it."""
        able = self.samplers()
        able = {name: load for name, load in able.items() if name not in avoid} or able
        if session is None:
            return _take(able.values(), sequences, now_s)
        name = self._place(session, able)
        return _take([able[name]], sequences, now_s) if name is not None else None

    def pick_prefill(self, now_s: float, avoid: Collection[str] = ()) -> EngineLoad | None:
        """The least loaded prefill engine, as :meth:`pick`, for one sequence."""
        return _take(self.prefills(avoid), 1, now_s)

    def samplers(self) -> dict[str, EngineLoad]:
        """Engines that sample: all but prefill engines, or all if there are no others."""
        found = {n: load for n, load in self.engines.items() if load.route.pd_role != "prefill"}
        return found or self.engines

    def prefills(self, avoid: Collection[str] = ()) -> list[EngineLoad]:
        """Prefill engines, except these."""
        found = (load for load in self.engines.values() if load.route.pd_role == "prefill")
        return [load for load in found if load.route.engine not in avoid]

    def is_split(self) -> bool:
        """Whether some engines prefill for others."""
        return {"prefill", "decode"} <= {each.route.pd_role for each in self.engines.values()}

    def release(self, load: EngineLoad, sequences: int) -> None:
        """They are no longer in flight there."""
        load.in_flight -= sequences

    def succeeded(self, load: EngineLoad) -> None:
        """A sequence has ended there by itself."""
        grown = load.window + (1 if load.window < load.goal else 1 / load.window)
        load.window = min(load.slots, grown)
        load.hold_s = _HOLD_S

    def rejected(self, load: EngineLoad, now_s: float) -> None:
        """It takes no requests now, or can't be reached: leave it alone for a while."""
        if now_s >= load.held_until_s:  # once for all that were under way
            load.halve_window(_AFTER_REJECTION)
            load.held_until_s = now_s + load.hold_s
            load.hold_s = min(2 * load.hold_s, _LONGEST_HOLD_S)

    def next_release_s(self, now_s: float) -> float | None:
        """When the next engine that is left alone may be tried again; None if none is."""
        held = [load.held_until_s for load in self.engines.values() if load.held_until_s > now_s]
        return min(held, default=None)

    def finish_session(self, session: str) -> None:
        """Forget it."""
        engine = self._sessions.pop(session, None)
        if engine is not None:
            self._count[engine] -= 1

    def engine_of(self, session: str) -> str | None:
        """Which engine a session is on."""
        return self._sessions.get(session)

    def _place(self, session: str, able: dict[str, EngineLoad]) -> str | None:
        last = self._sessions.get(session)
        if last is not None and last in able:
            self._sessions.move_to_end(session)
            return last
        if not able:
            return None
        self.finish_session(session)
        total = sum(self._count[name] for name in able) + 1
        bound = math.ceil(_LOAD_BOUND * total / len(able))
        ranked = sorted(able, key=lambda name: _score(session, name), reverse=True)
        # One has less than the mean, so this is never empty.
        chosen = next(name for name in ranked if self._count[name] < bound)
        self._sessions[session] = chosen
        self._count[chosen] += 1
        if len(self._sessions) > _SESSIONS_KEPT:
            self.finish_session(next(iter(self._sessions)))
        return chosen


def _take(able: Iterable[EngineLoad], sequences: int, now_s: float) -> EngineLoad | None:
    """The least loaded with room for so many sequences, which count as in flight there."""
    for load in sorted(able, key=lambda e: (e.fill, e.route.engine)):
        if load.has_room(sequences, now_s):
            load.in_flight += sequences
            load.peaks = (max(load.peaks[0], load.in_flight), *load.peaks[1:])
            return load
    return None


def _score(session: str, engine: str) -> bytes:
    """The same in each process."""
    return hashlib.blake2b(f"{session}\0{engine}".encode(), digest_size=8).digest()
