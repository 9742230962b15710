"""Chooses the engine of each request. Does no I/O; callers pass the time, in seconds.

========================  ===================================================================
a request                 goes to
========================  ===================================================================
of a session              the engine that served the session last, while that engine is routable
of a new session          by rendezvous hashing: the engine with the highest score among those with
                          at most 1.25 times the mean number of sessions
without a session         the least loaded engine
========================  ===================================================================

Prefill engines are not chosen while another engine is routable. Instead, they compute the prompts
of requests that run on decode engines (:meth:`Router.prefills`).

Requests that may run on the same engines wait in one queue (:class:`WaitingRequests`): those of one
engine's sessions, or those that any engine may take. In a queue, clients take turns, and each
client's requests keep their order. The work for a request does not depend on how many others wait.

Invariants: at most ``window`` sequences are in flight on an engine, unless a single request has
more. A window is between one and the engine's slots (the sequences that the engine runs at once).
A window halves on rejections and while requests wait in the engine. It grows on completions: up to
its goal by one for each completion, beyond the goal by one per window of completions. A session
moves only if its engine leaves the routes, or if its request must avoid the engine.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec.structs import replace

from bus.messages import RequestLimits

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable, Iterator

    from bus.messages import EngineView, Route

_SESSIONS_KEPT: Final = 100_000
_LOAD_BOUND: Final = 1.25
_UNKNOWN_SLOTS: Final = 256
_HOLD_S: Final = 0.05
_LONGEST_HOLD_S: Final = 1.0
# The share of a halved window that completions restore fast. An engine that was closed or paused
# can take as many requests as before; an engine in which requests waited can't.
_AFTER_REJECTION: Final = 1.0
_AFTER_QUEUE: Final = 0.75
_PEAKS: Final = 3  # reports kept, because an engine's count may be that many reports old
# The engine of a session ("": no session; None: no engine is routable), and the engines to avoid.
QueueKey: TypeAlias = tuple[str | None, frozenset[str]]


@dataclass(slots=True)
class EngineLoad:
    """A routable engine and its load.

    Attributes:
        route: the engine's endpoint and limits.
        window: how many of this client's sequences may be in flight on the engine.
        in_flight: how many of this client's sequences are in flight on the engine.
        held_until_s: until when no request is sent to the engine, in seconds.
        hold_s: how long the next hold lasts, in seconds.
        others: how many sequences of other clients the engine has.
        peaks: the greatest ``in_flight`` since the broker's last report of the engine's requests,
            then the greatest values between earlier reports, the latest first.
        queued: how many requests the engine had in the last report, if some of them waited; else 0.
        goal: the window size below which each finished sequence adds one to the window.
        waiting: how many requests waited in the engine in the last report; None: unknown.
        step: the number of the engine core's last step in that report.
        progress_s: when the engine last gave any request a token, in seconds.
        newest_s: among the attempts that got their first token since the last look, when the latest
            began, in seconds.
        since: the revision of the routes that added the engine, for the first time or again.
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
    waiting: int | None = None
    step: int = 0
    progress_s: float = 0.0
    newest_s: float = 0.0
    since: int = 0

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

    def is_too_short(self, length: int) -> bool:
        """Returns whether prompt and output of ``length`` tokens are more than the engine takes."""
        return 0 < self.route.limits.max_model_len < length

    def take(self, sequences: int) -> None:
        """Counts sequences as in flight, until :meth:`Router.release`."""
        self.in_flight += sequences
        self.peaks = (max(self.peaks[0], self.in_flight), *self.peaks[1:])

    def halve_window(self, regained: float) -> None:
        """Halves the window; completions soon restore ``regained`` of its former size."""
        self.goal = regained * max(self.window, self.goal)
        self.window = max(1.0, self.window / 2)


class Router:
    """Chooses engines for requests, and keeps each session on its engine.

    Attributes:
        engines: the routable engines, by name.
        samplers: the engines that sample: all but prefill engines, or all if there are no others.
        limits: the strictest limits among the engines; 0 where no engine reports a limit.
        is_split: whether the group has both prefill and decode engines.
        revision: grows with each update of the routes.
    """

    def __init__(self) -> None:
        self.engines: dict[str, EngineLoad] = {}
        # By engine and endpoint: the routed engines, and gone engines with requests in flight.
        self._loads: dict[tuple[str, str], EngineLoad] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()  # the least recently used first
        self._count: Counter[str] = Counter()  # sessions of each engine
        self.revision = 0
        self.update(())

    def update(self, routes: Iterable[Route]) -> None:
        """Replaces the routable engines by those of the new routes."""
        self.revision += 1
        now: dict[str, EngineLoad] = {}
        for route in routes:
            if not route.endpoint:
                continue
            key = route.engine, route.endpoint
            load = self._loads.setdefault(
                key, EngineLoad(route, float(route.limits.slots or _UNKNOWN_SLOTS))
            )
            if route.engine not in self.engines:
                load.held_until_s, load.since = 0.0, self.revision  # new, or back
            load.route = route
            now[route.engine] = load
        self.engines = now
        kept = self._loads.items()
        self._loads = {key: e for key, e in kept if e.in_flight or now.get(key[0]) is e}
        others = {n: load for n, load in now.items() if load.route.pd_role != "prefill"}
        self.samplers = others or now
        self.is_split = {"prefill", "decode"} <= {load.route.pd_role for load in now.values()}
        self.limits = _strictest([load.route.limits for load in now.values()])

    def take_figures(self, engines: Iterable[EngineView], now_s: float = 0.0) -> None:
        """Stores the broker's report of each engine's requests and steps.

        An engine without a report counts as one without requests of other clients. An engine's
        window is halved if requests wait there in two reports in a row, and the number of its
        requests has not grown: then the engine lacks slots or memory. Requests that wait in only
        one report may just wait for the next step.
        """
        known = {(each.name, each.endpoint): each for each in engines}
        for key, load in self._loads.items():
            view = known.get(key)
            total, waiting = (view.in_flight, view.waiting) if view is not None else (0, 0)
            if view is not None and view.core_phase:
                load.waiting = waiting
                if view.core_step != load.step:
                    load.step, load.progress_s = view.core_step, now_s
            load.others = max(0, total - max(load.peaks))
            load.peaks = (load.in_flight, *load.peaks[:_PEAKS])
            queued, load.queued = load.queued, total if waiting else 0
            if 0 < load.queued <= queued:
                load.halve_window(_AFTER_QUEUE)

    def least_loaded(self, now_s: float, avoid: Collection[str] = ()) -> EngineLoad | None:
        """Returns the least loaded engine for a request that needs no slot.

        Args:
            avoid: engines that failed the request, used only if there are no others.

        Returns:
            The engine; None if all engines are full or have rejected requests just now.
        """
        free = [load for load in self.able(avoid).values() if load.has_room(0, now_s)]
        return min(free, key=lambda load: (load.fill, load.route.engine), default=None)

    def able(self, avoid: Collection[str] = ()) -> dict[str, EngineLoad]:
        """Returns the engines that sample, without those to avoid unless there are no others."""
        if not avoid:
            return self.samplers
        rest = {name: load for name, load in self.samplers.items() if name not in avoid}
        return rest or self.samplers

    def too_short(self, length: int) -> frozenset[str]:
        """Returns the engines that take fewer than ``length`` tokens of prompt and output."""
        if not 0 < self.limits.max_model_len < length:
            return frozenset()
        return frozenset(name for name, e in self.engines.items() if e.is_too_short(length))

    def avoiding(self, avoid: frozenset[str], length: int) -> frozenset[str]:
        """Returns the engines to avoid: failed engines, and engines that take too few tokens.

        Args:
            avoid: engines that failed the request; left out of the result if no others remain.
            length: how many tokens the request's prompt and output may have together.
        """
        short = self.too_short(length)
        if not short or self.samplers.keys() <= short | avoid:
            return short or avoid
        return short | avoid

    def limits_of(self, prompt: int, max_tokens: int | None) -> RequestLimits:
        """Returns the limits of a request: those of the engines that may run the request.

        Args:
            prompt: how many tokens the prompt has.
            max_tokens: how many tokens the output may have. None: as many as every engine allows
                that takes the prompt.
        """
        limits = [load.route.limits for load in self.samplers.values()]
        lengths = [each.max_model_len for each in limits]
        roomy = [length for length in lengths if length > prompt]
        if max_tokens is not None or not roomy:
            longest = 0 if 0 in lengths else max(lengths, default=0)
        else:
            longest = min(roomy)
        return replace(self.limits, max_model_len=longest)

    def prefills(self, avoid: Collection[str] = ()) -> dict[str, EngineLoad]:
        """Returns all prefill engines except those in ``avoid``."""
        found = self.engines.items()
        return {n: e for n, e in found if e.route.pd_role == "prefill" and n not in avoid}

    def release(self, load: EngineLoad, sequences: int) -> None:
        """Records that sequences are no longer in flight on an engine."""
        load.in_flight -= sequences

    def succeeded(self, load: EngineLoad) -> None:
        """Records that an engine has finished a sequence, so that its window grows."""
        grown = load.window + (1 if load.window < load.goal else 1 / load.window)
        load.window = min(load.slots, grown)
        load.hold_s = _HOLD_S

    def rejected(self, load: EngineLoad, now_s: float) -> None:
        """Records that an engine rejects requests or is unreachable, and avoids it for a while."""
        if now_s >= load.held_until_s:  # only once for all requests that were in flight
            load.halve_window(_AFTER_REJECTION)
            load.held_until_s = now_s + load.hold_s
            load.hold_s = min(2 * load.hold_s, _LONGEST_HOLD_S)

    def finish_session(self, session: str) -> None:
        """Ends a session, so that its engine has room for another session."""
        engine = self._sessions.pop(session, None)
        if engine is not None:
            self._count[engine] -= 1

    def place(self, session: str, avoid: Collection[str] = ()) -> str | None:
        """Returns the name of a session's engine, and chooses the engine of a new session.

        Args:
            avoid: engines that failed the request, used only if there are no others.
        """
        able = self.able(avoid)
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
        # At least one engine has fewer sessions than the mean, so this finds an engine.
        chosen = next(name for name in ranked if self._count[name] < bound)
        self._sessions[session] = chosen
        self._count[chosen] += 1
        if len(self._sessions) > _SESSIONS_KEPT:
            self.finish_session(next(iter(self._sessions)))
        return chosen


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for an engine.

    Attributes:
        client: the client that takes turns with others.
        session: the request's session, or None.
        sequences: how many sequences the request has.
        avoid: names of engines that failed the request.
        since_s: since when the request waits, in seconds.
        granted: the engine; None: no engine is left that may be chosen.
        queue: the queue in which the request waits; None: the request no longer waits.
    """

    client: str
    session: str | None
    sequences: int
    avoid: frozenset[str]
    since_s: float
    granted: asyncio.Future[EngineLoad | None]
    queue: Queue | None = None


@dataclass(eq=False, slots=True)
class _Turn:
    """A client's requests in a queue; the client with the lowest ``number`` is next."""

    number: int
    waiters: OrderedDict[Waiter, None] = field(default_factory=OrderedDict)


@dataclass(eq=False, slots=True)
class Queue:
    """Requests that may run on the same engines."""

    key: QueueKey
    engines: Collection[str]
    turns: OrderedDict[str, _Turn] = field(default_factory=OrderedDict)


class WaitingRequests:
    """The requests that wait, each in a queue."""

    def __init__(self) -> None:
        self._queues: dict[QueueKey, Queue] = {}
        self._shared: dict[QueueKey, Queue] = {}  # the queues of more than one engine
        self._arrivals: OrderedDict[Waiter, None] = OrderedDict()
        self._turns = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, waiter: Waiter, key: QueueKey, engines: Collection[str]) -> bool:
        """Adds a request to a queue; returns whether the request is the queue's first.

        Args:
            waiter: the request.
            key: the queue's key.
            engines: the names of the engines on which the requests of this queue may run.
        """
        queue = self._queues.get(key)
        is_first = queue is None
        if queue is None:
            queue = self._queues[key] = Queue(key, engines)
            if not key[0]:
                self._shared[key] = queue
        turn = queue.turns.get(waiter.client)
        if turn is None:
            turn = queue.turns[waiter.client] = _Turn(self._next_turn())
        turn.waiters[waiter] = None
        waiter.queue = queue
        self._arrivals.setdefault(waiter)
        return is_first

    def first(self, engine: str) -> Waiter | None:
        """Returns the request whose turn it is at an engine, even without room."""
        own = self._queues.get((engine, frozenset()))
        queues = [own] if own is not None else []
        queues += [queue for queue in self._shared.values() if engine in queue.engines]
        heads = [head for queue in queues if (head := self._head(queue)) is not None]
        return min(heads, key=lambda head: head[0])[1] if heads else None

    def remove(self, waiter: Waiter) -> None:
        """Removes a request, if it still waits. If it got an engine, its client's turn ends."""
        queue = waiter.queue
        if queue is None:
            return
        waiter.queue = None
        del self._arrivals[waiter]
        turn = queue.turns[waiter.client]
        del turn.waiters[waiter]
        if not turn.waiters:
            del queue.turns[waiter.client]
        elif waiter.granted.done() and not waiter.granted.cancelled():
            turn.number = self._next_turn()
            queue.turns.move_to_end(waiter.client)
        if not queue.turns:
            del self._queues[queue.key]
            self._shared.pop(queue.key, None)

    @property
    def oldest_s(self) -> float:
        """Since when the oldest request waits, in seconds; infinite if no request waits."""
        return next(iter(self._arrivals)).since_s if self._arrivals else math.inf

    def pop_since(self, at_s: float) -> Iterator[Waiter]:
        """Removes and yields the requests that have waited since ``at_s`` or longer."""
        while self.oldest_s <= at_s:
            waiter = next(iter(self._arrivals))
            self.remove(waiter)
            yield waiter

    def reroute(
        self,
        place: Callable[[Waiter], tuple[QueueKey, Collection[str]]],
        routed: Collection[str],
    ) -> list[Waiter]:
        """Moves requests whose engine has left the routes; others keep their turns.

        Args:
            place: returns a request's queue, and the engines of that queue.
            routed: the names of the engines that have queues of their own.

        Returns:
            The requests that no engine may take.
        """
        moved: list[Waiter] = []
        lost: list[Waiter] = []
        for key, queue in list(self._queues.items()):
            waiters = [waiter for turn in queue.turns.values() for waiter in turn.waiters]
            if key[0] == "":
                queue.engines = place(waiters[0])[1]
                lost += () if queue.engines else waiters
            elif key[0] not in routed:
                del self._queues[key]
                self._shared.pop(key, None)
                moved += waiters
        for waiter in moved:
            self.add(waiter, *place(waiter))
        return lost

    def _head(self, queue: Queue) -> tuple[int, Waiter] | None:
        """Returns a queue's first request and its turn's number; drops requests that were ended."""
        while queue.turns:
            turn = next(iter(queue.turns.values()))
            waiter = next(iter(turn.waiters))
            if not waiter.granted.done():
                return turn.number, waiter
            self.remove(waiter)
        return None

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns


def _strictest(limits: Collection[RequestLimits]) -> RequestLimits:
    def least(values: Iterable[int]) -> int:
        return min((value for value in values if value), default=0)

    return RequestLimits(
        vocab_size=least(each.vocab_size for each in limits),
        max_model_len=least(each.max_model_len for each in limits),
        slots=least(each.slots for each in limits),
        exact_seeds=all(each.exact_seeds for each in limits),
    )


def _score(session: str, engine: str) -> bytes:
    """Returns a session's score for an engine, for rendezvous hashing; the same in any process."""
    return hashlib.blake2b(f"{session}\0{engine}".encode(), digest_size=8).digest()
