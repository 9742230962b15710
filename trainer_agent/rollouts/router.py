"""Chooses the engine of each request. No I/O; callers pass the time, in seconds.

========================  ===================================================================
a request                 goes to
========================  ===================================================================
of a session              the engine that served the session last, while it is routable
of a new session          by rendezvous hashing: the engine with the highest score that has at
                          most 1.25 times the mean of sessions
without a session         the least loaded engine
========================  ===================================================================

Prefill engines are not chosen while another engine is routable. They compute the prompts of
requests that run on decode engines (:meth:`Router.pick_prefill`).

Invariants: at most ``window`` sequences are in flight on an engine, unless a single request has
more. A window is at least one and at most the engine's slots (sequences that it runs at once). It
halves on rejections and while requests wait in the engine. It grows on completions: by one for each
up to its goal, beyond that by one per window of completions. A session moves only if its engine
leaves the routes, or if its request must avoid the engine.
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
# The share of a halved window that completions restore fast. An engine that was closed or paused
# can take as many requests as before. An engine in which requests waited had too many.
_AFTER_REJECTION: Final = 1.0
_AFTER_QUEUE: Final = 0.75
_PEAKS: Final = 3  # reports kept; an engine's count may be that many reports old


@dataclass(slots=True)
class EngineLoad:
    """A routable engine and its load.

    Attributes:
        route: the engine's endpoint and limits.
        window: how many of this client's sequences may be in flight there.
        in_flight: how many of this client's sequences are in flight there.
        held_until_s: until when no request is sent to the engine, in seconds.
        hold_s: how long the next hold lasts, in seconds.
        others: how many sequences of other clients the engine has.
        peaks: the greatest ``in_flight`` since the broker's last report of the engine's requests,
            then those between earlier reports, the latest first.
        queued: how many requests the engine had in the last report, if some of them waited; else 0.
        goal: the window size below which each finished sequence adds one to the window.
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
        """The number of sequences that the engine runs at once."""
        return self.route.limits.slots or _UNKNOWN_SLOTS

    @property
    def fill(self) -> float:
        """The share of slots that are in use."""
        return (self.in_flight + self.others) / self.slots

    def has_room(self, sequences: int, now_s: float) -> bool:
        """Returns whether ``sequences`` more sequences may be sent to the engine now."""
        fits = not self.in_flight or self.in_flight + sequences <= self.window
        return fits and now_s >= self.held_until_s

    def halve_window(self, regained: float) -> None:
        """Halves the window; it soon grows back to the share ``regained`` of its former size."""
        self.goal = regained * max(self.window, self.goal)
        self.window = max(1.0, self.window / 2)


class Router:
    """Chooses engines for requests, and keeps each session on its engine.

    Attributes:
        engines: the routable engines, by name.
        samplers: the engines that sample: all but prefill engines, or all if there are no others.
        limits: the limits that all engines accept; 0 where no engine reports a limit.
        is_split: whether some engines prefill for others that decode.
    """

    def __init__(self) -> None:
        self.engines: dict[str, EngineLoad] = {}
        # By engine and endpoint: the routed engines, and those with requests of this client.
        self._loads: dict[tuple[str, str], EngineLoad] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()  # the least recently used first
        self._count: Counter[str] = Counter()  # sessions of each engine
        self.update(())

    def update(self, routes: Iterable[Route]) -> None:
        """Replaces the routable engines by those of the new routes."""
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
        others = {n: load for n, load in now.items() if load.route.pd_role != "prefill"}
        self.samplers = others or now
        self.is_split = {"prefill", "decode"} <= {load.route.pd_role for load in now.values()}
        self.limits = _strictest([load.route.limits for load in now.values()])

    def take_figures(self, engines: Iterable[EngineView]) -> None:
        """Stores each engine's number of requests, as the broker reports it.

        An engine without a report counts as one without requests of other clients. An engine's
        window is halved if requests wait there in two reports in a row, and the number of its
        requests has not grown: then the engine lacks slots or memory. Requests that wait in one
        report alone may only wait for the next step.
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
        """Chooses a request's engine, and counts its sequences there until :meth:`release`.

        Args:
            session: the request's session, or None.
            sequences: how many sequences the request has.
            now_s: the time, in seconds.
            avoid: engines that failed the request before, used only if there are no others.

        Returns:
            The engine; None if the request must wait.
        """
        able = self.samplers
        if avoid:
            able = {name: load for name, load in able.items() if name not in avoid} or able
        if session is None:
            return _take(able.values(), sequences, now_s)
        name = self._place(session, able)
        return _take([able[name]], sequences, now_s) if name is not None else None

    def pick_prefill(self, now_s: float, avoid: Collection[str] = ()) -> EngineLoad | None:
        """Chooses the least loaded prefill engine for one sequence; None if all are busy.

        Args:
            now_s: the time, in seconds.
            avoid: engines that must not be chosen.
        """
        return _take(self.prefills(avoid), 1, now_s)

    def prefills(self, avoid: Collection[str] = ()) -> list[EngineLoad]:
        """Returns all prefill engines except those in ``avoid``."""
        found = (load for load in self.engines.values() if load.route.pd_role == "prefill")
        return [load for load in found if load.route.engine not in avoid]

    def release(self, load: EngineLoad, sequences: int) -> None:
        """Records that sequences are no longer in flight on an engine."""
        load.in_flight -= sequences

    def succeeded(self, load: EngineLoad) -> None:
        """Records that an engine has finished a sequence, so that its window grows."""
        grown = load.window + (1 if load.window < load.goal else 1 / load.window)
        load.window = min(load.slots, grown)
        load.hold_s = _HOLD_S

    def rejected(self, load: EngineLoad, now_s: float) -> None:
        """Records that an engine rejects requests or is unreachable, and sends none for a while."""
        if now_s >= load.held_until_s:  # once for all requests that were in flight
            load.halve_window(_AFTER_REJECTION)
            load.held_until_s = now_s + load.hold_s
            load.hold_s = min(2 * load.hold_s, _LONGEST_HOLD_S)

    def next_release_s(self, now_s: float) -> float | None:
        """Returns when the first held engine gets requests again; None if none is held."""
        held = [load.held_until_s for load in self.engines.values() if load.held_until_s > now_s]
        return min(held, default=None)

    def finish_session(self, session: str) -> None:
        """Ends a session, so that its engine has room for another one."""
        engine = self._sessions.pop(session, None)
        if engine is not None:
            self._count[engine] -= 1

    def engine_of(self, session: str) -> str | None:
        """Returns the name of a session's engine, or None."""
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


def _strictest(limits: Collection[RequestLimits]) -> RequestLimits:
    def least(values: Iterable[int]) -> int:
        return min((value for value in values if value), default=0)

    return RequestLimits(
        vocab_size=least(each.vocab_size for each in limits),
        max_model_len=least(each.max_model_len for each in limits),
        slots=least(each.slots for each in limits),
        exact_seeds=all(each.exact_seeds for each in limits),
    )


def _take(able: Iterable[EngineLoad], sequences: int, now_s: float) -> EngineLoad | None:
    """Chooses the least loaded engine with room for these sequences, and adds them there."""
    for load in sorted(able, key=lambda e: (e.fill, e.route.engine)):
        if load.has_room(sequences, now_s):
            load.in_flight += sequences
            load.peaks = (max(load.peaks[0], load.in_flight), *load.peaks[1:])
            return load
    return None


def _score(session: str, engine: str) -> bytes:
    """Returns a session's score for an engine, for rendezvous hashing; equal in all processes."""
    return hashlib.blake2b(f"{session}\0{engine}".encode(), digest_size=8).digest()
