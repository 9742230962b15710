"""Assigns engines to a client's requests, and ends attempts and requests that wait in vain."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bus.errors import BusClosed, NoEngine, WavebusError
from trainer_agent._failures import require_process
from trainer_agent._rollouts.attempt import RefusedModels
from trainer_agent._rollouts.router import Router, Waiter, WaitingRequests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Collection, Iterable

    from bus.messages import EngineView, Routes
    from trainer_agent._connection import Connection
    from trainer_agent._rollouts.router import EngineLoad, QueueKey

_SERVING: Final = ("running", "staging")
_FIGURES_S: Final = 0.5
_NOBODY: Final = frozenset[str]()


@dataclass(eq=False, slots=True)
class RequestUnderWay:
    """A request that may be ended early.

    Attributes:
        limit: a timeout that ends the request when it expires.
        asked_id: the caller's own id of the request; empty: none.
        is_aborted: whether the request ends with the tokens that it has, not with an error.
    """

    limit: asyncio.Timeout
    asked_id: str
    is_aborted: bool = False


@dataclass(eq=False, slots=True)
class AttemptWatch:
    """An attempt under way, watched for stalls.

    An attempt without tokens may still wait in the queue of an engine that serves other requests.
    But the engine has lost the attempt if none of its requests wait, or if an attempt that began
    later got tokens first.

    Attributes:
        load: the engine.
        limit: the attempt's timeout; made to expire after ``stall_s`` without a token.
        begun_s: when the attempt began, on the event loop's clock.
        last_s: when the last token arrived; ``begun_s`` before the first.
        excused_s: when the attempt was last known to wait in a queue, or for a pause to end.
        in_order: whether the engine serves the attempt in the order of arrival.
        is_overtaken: whether an attempt that began later got a first token since ``last_s``.
        is_delivering: whether the caller is taking tokens, so that the answer is not read.
    """

    load: EngineLoad
    limit: asyncio.Timeout
    begun_s: float
    last_s: float
    excused_s: float = 0.0
    in_order: bool = True
    is_overtaken: bool = False
    is_delivering: bool = False

    @property
    def engine(self) -> str:
        return self.load.route.engine

    async def wait_for_caller(self, taken: Awaitable[None]) -> None:
        """Waits until the caller has taken tokens; the attempt does not count as stalled."""
        self.is_delivering = True
        try:
            await taken
        finally:
            self.is_delivering = False

    def look(self, since_s: float) -> None:
        """Excuses the attempt if it waits in the engine's queue; ``since_s``: the last look."""
        load = self.load
        if self.in_order and self.begun_s < load.newest_s and self.last_s < since_s:
            self.is_overtaken = True
        if load.waiting != 0 and not self.is_overtaken:
            self.excused_s = max(self.excused_s, load.progress_s)


class EngineQueue:
    """Assigns engines to requests, which wait for their turn and for room.

    Between two events, no engine has room for the request whose turn it is there. So an event
    concerns only the engines that may have become free, and wakes only requests that can run.
    """

    def __init__(self) -> None:
        self.router = Router()
        self._waiting = WaitingRequests()
        self._for_prefill = WaitingRequests()  # requests that have a decode engine already
        self._revision = self.router.revision  # of the routes that the queues follow
        self._holds: dict[str, asyncio.TimerHandle] = {}  # by engine: the end of its hold

    async def acquire(
        self, session: str | None, sequences: int, avoid: frozenset[str], client: str = ""
    ) -> EngineLoad:
        """Waits for the request's turn, and returns its engine.

        Args:
            session: the request's session, or None.
            avoid: names of engines that failed the request, used only if there are no others.
            client: the client that asks; clients take turns.

        Raises:
            NoEngine: no engine was available in time.
        """
        load = await self._wait(self._waiting, client, session, sequences, avoid)
        assert load is not None
        return load

    async def acquire_prefill(self, avoid: frozenset[str], client: str = "") -> EngineLoad | None:
        """Waits until a prefill engine can take one sequence, and reserves a place there.

        Args:
            avoid: names of engines that must not be chosen.
            client: as in :meth:`acquire`.

        Returns:
            The engine; None if no prefill engine remains beside those to avoid.

        Raises:
            NoEngine: prefill engines remain, but none was available in time.
        """
        return await self._wait(self._for_prefill, client, None, 1, avoid)

    async def _wait(
        self,
        waiting: WaitingRequests,
        client: str,
        session: str | None,
        sequences: int,
        avoid: frozenset[str],
    ) -> EngineLoad | None:
        granted: asyncio.Future[EngineLoad | None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(client, session, sequences, avoid, self.now_s(), granted)
        self._follow_routes()
        place = self._place_prefill if waiting is self._for_prefill else self._place
        key, engines = place(waiter)
        if waiting is self._for_prefill and not engines:
            return None
        if waiting.add(waiter, key, engines):
            self._grant([self.router.engines[name] for name in engines], granted)
        try:
            return await granted
        except BaseException:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                if (load := granted.result()) is not None:
                    self.release(load, sequences)
            elif (queue := waiter.queue) is not None:
                waiting.remove(waiter)
                routed = self.router.engines
                self._grant([routed[name] for name in queue.engines if name in routed])
            raise

    def release(self, load: EngineLoad, sequences: int) -> None:
        """Frees an engine's slots after an attempt, and assigns them to waiting requests.

        Args:
            load: the engine, from :meth:`acquire`.
        """
        self.router.release(load, sequences)
        if self.router.engines.get(load.route.engine) is load:
            self._grant([load])

    def _grant(
        self, loads: Iterable[EngineLoad], until: asyncio.Future[EngineLoad | None] | None = None
    ) -> None:
        """Assigns free engines to the requests whose turn it is, the least loaded engine first.

        Args:
            loads: engines that may have become free. The others have no room for their next turn.
            until: stops as soon as this request has an engine.
        """
        now_s = self.now_s()
        if self._follow_routes():
            loads = self.router.engines.values()
        free = [(load.fill, load.route.engine, load) for load in loads]
        heapq.heapify(free)
        while free and (self._waiting or self._for_prefill):
            _, name, load = free[0]
            if self._serve(load, now_s):
                heapq.heapreplace(free, (load.fill, name, load))
            else:
                heapq.heappop(free)
            if until is not None and until.done():
                return

    def _serve(self, load: EngineLoad, now_s: float) -> bool:
        """Assigns an engine to the request whose turn it is, if there is room."""
        name = load.route.engine
        for waiting in (self._for_prefill, self._waiting):
            waiter = waiting.first(name)
            if waiter is None:
                continue
            if now_s < load.held_until_s:
                if name not in self._holds:
                    later = asyncio.get_running_loop().call_later
                    self._holds[name] = later(load.held_until_s - now_s, self._on_held, name)
            elif load.has_room(waiter.sequences, now_s):
                load.take(waiter.sequences)
                waiter.granted.set_result(load)
                waiting.remove(waiter)
                return True
        return False

    def _on_held(self, name: str) -> None:
        del self._holds[name]
        if name in self.router.engines:
            self._grant([self.router.engines[name]])

    def _place(self, waiter: Waiter) -> tuple[QueueKey, Collection[str]]:
        """Returns the queue of a request that samples, and that queue's engines."""
        if waiter.session is None:
            return ("", waiter.avoid), self.router.able(waiter.avoid)
        engine = self.router.place(waiter.session, waiter.avoid)
        return (engine, _NOBODY), (engine,) if engine is not None else ()

    def _place_prefill(self, waiter: Waiter) -> tuple[QueueKey, Collection[str]]:
        return ("", waiter.avoid), self.router.prefills(waiter.avoid)

    def _follow_routes(self) -> bool:
        """Moves waiting requests if the routes have changed; returns whether they have."""
        if self._revision == self.router.revision:
            return False
        self._revision = self.router.revision
        self._waiting.reroute(self._place, self.router.samplers)
        for waiter in self._for_prefill.reroute(self._place_prefill, ()):
            waiter.granted.set_result(None)
            self._for_prefill.remove(waiter)
        return True

    def _waits_since(self, at_s: float) -> bool:
        """Returns whether a request has waited since ``at_s`` or longer."""
        return any(waiting.oldest_s <= at_s for waiting in (self._waiting, self._for_prefill))

    def _fail_since(self, at_s: float, reason: str) -> None:
        """Fails the requests that have waited since ``at_s`` or longer, with ``NoEngine``."""
        for waiting in (self._waiting, self._for_prefill):
            for waiter in waiting.pop_since(at_s):
                if not waiter.granted.done():
                    waiter.granted.set_exception(NoEngine(reason))

    def now_s(self) -> float:
        """Returns the time in seconds, on the clock of event loops."""
        return time.monotonic()


class EnginePool(EngineQueue):
    """Assigns the routable engines of a group to requests, and watches for stalled engines.

    Args:
        connection: the rollout client's connection to the broker.
        stall_s: how long a running engine may take for the next token, in seconds; then the attempt
            is cancelled.
        unavailable_s: how long a request waits while no engine is available, in seconds.

    Attributes:
        refused_models: the engines that refused a model since the routes or versions changed.
    """

    def __init__(
        self,
        group: str,
        connection: Connection,
        *,
        stall_s: float,
        unavailable_s: float,
    ) -> None:
        super().__init__()
        self.attempts: set[AttemptWatch] = set()
        self.requests: set[RequestUnderWay] = set()
        self.refused_models = RefusedModels()
        self.stall_s = stall_s
        self._group = group
        self.unavailable_s = unavailable_s
        self._connection = connection
        connection.on_routes = self._on_routes
        self._routed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._asking: asyncio.Future[tuple[EngineView, ...]] | None = None
        self._last_token_s = 0.0
        self._looked_s = 0.0
        self._pid = 0  # the process that has connected

    async def open(self) -> None:
        """Joins the bus; returns when the broker has accepted the join.

        Raises:
            BusTimeout: no broker answers.
            Refused: the broker refuses the join.
        """
        await self._connection.open()
        self._pid = os.getpid()
        self._last_token_s = self.now_s()
        self._watch = asyncio.create_task(self._watch_engines())

    def close(self) -> None:
        """Leaves the bus, and ends all requests under way with ``BusClosed``."""
        for each in self.requests:
            expire(each.limit)
        self._connection.close()
        for hold in self._holds.values():
            hold.cancel()
        if self._watch is not None:
            self._watch.cancel()

    @contextlib.asynccontextmanager
    async def under_way(self, request_id: str, asked_id: str) -> AsyncIterator[None]:
        """Runs a request in a block, which :meth:`abort` ends early.

        Args:
            request_id: the request's id, for errors.
            asked_id: the caller's own id of the request; empty: none.

        Raises:
            BusClosed: the pool was closed.
        """
        this = RequestUnderWay(asyncio.timeout(None), asked_id)
        try:
            async with this.limit:
                self.requests.add(this)
                try:
                    yield
                finally:
                    self.requests.discard(this)
        except Exception:
            if this.limit.when() is None:
                raise
            if not this.is_aborted:  # `close` ended the request
                raise BusClosed(f"request {request_id}: the client was closed") from None

    def abort(self, request_ids: Collection[str] | None) -> int:
        """Ends requests, which keep their tokens; returns how many were ended.

        Args:
            request_ids: the callers' own ids of the requests; None: all requests.
        """
        found = [r for r in self.requests if request_ids is None or r.asked_id in request_ids]
        for each in found:
            each.is_aborted = True
            expire(each.limit)
        return len(found)

    def require_process(self) -> None:
        """Raises ``BusClosed`` in a process forked after :meth:`open`."""
        require_process(self._pid, self._connection.address)

    def on_token(self, attempt: AttemptWatch) -> None:
        """Records that an attempt has received a token."""
        now_s, load = self.now_s(), attempt.load
        if attempt.last_s == attempt.begun_s and attempt.in_order:
            load.newest_s = max(load.newest_s, attempt.begun_s)
        load.progress_s = self._last_token_s = attempt.last_s = now_s
        attempt.is_overtaken = False

    async def until_routed(self) -> None:
        """Waits until an engine is routable.

        Raises:
            NoEngine: as :meth:`acquire`.
        """
        while not self.router.engines:
            try:
                await asyncio.wait_for(self._routed.wait(), self.unavailable_s)
            except TimeoutError:
                await self.require_engines()

    async def require_engines(self, since_s: float = 0.0, last: str = "") -> None:
        """Checks that an engine of the group will take a request, perhaps after a pause.

        Args:
            since_s: when engines began to refuse a request. Nothing is checked until
                ``unavailable_s`` have passed since then and since the last token of any request.
            last: how the last engine refused the request, for the error's text.

        Raises:
            NoEngine: no engine is paused or asleep, so waiting is in vain; the text names the
                group's engines.
        """
        if self.now_s() - max(since_s, self._last_token_s) < self.unavailable_s:
            return
        known = sorted(self.router.engines) or ["none"]
        try:
            engines = await self._engines()
        except WavebusError as error:
            raise NoEngine(
                f"no engine took a request for {self.unavailable_s:g} s; last routable: "
                f"{', '.join(known)}; the broker did not say more: {error}"
            ) from None
        if any(engine.phase not in _SERVING for engine in engines):
            return
        there = ", ".join(f"{each.name} at {each.endpoint or 'no endpoint'}" for each in engines)
        raise NoEngine(
            f"no engine took a request for {self.unavailable_s:g} s; engines in group "
            f"{self._group}: {there or 'none'}; routable: {', '.join(known)}"
            + f"; the last: {last}"
            * bool(last)
        )

    async def _engines(self) -> tuple[EngineView, ...]:
        """Returns the broker's view of the engines; asks once for all callers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._connection.engines())
        return await asyncio.shield(self._asking)

    async def _watch_engines(self) -> None:
        """Reads the engines' loads, and ends attempts and requests that wait in vain.

        An attempt waits in vain if its engine runs but gives no tokens; a request, if no engine is
        available. Runs until cancelled.
        """
        while True:
            await asyncio.sleep(min(_FIGURES_S, self.stall_s / 4, self.unavailable_s / 4))
            engines: tuple[EngineView, ...] = ()
            if self.attempts:
                with contextlib.suppress(WavebusError):
                    engines = await self._engines()
            self._look(engines, self.now_s())
            await self._fail_waiting()

    def _look(self, engines: tuple[EngineView, ...], now_s: float) -> None:
        """Takes the broker's figures, and cancels attempts that have stalled.

        Args:
            engines: the broker's view; empty: the broker did not answer.
        """
        idle = {engine.name for engine in engines if engine.phase not in _SERVING}
        self.router.take_figures((each for each in engines if each.name not in idle), now_s)
        for attempt in self.attempts:
            if not attempt.is_delivering:
                attempt.look(self._looked_s)
            if attempt.is_delivering or attempt.engine in idle:
                attempt.excused_s = now_s
            elif max(attempt.last_s, attempt.excused_s) < now_s - self.stall_s:
                expire(attempt.limit)
        for attempt in self.attempts:
            attempt.load.newest_s = 0.0
        self._looked_s = now_s

    async def _fail_waiting(self) -> None:
        """Fails the requests that have waited for ``unavailable_s`` while no engine works."""
        if self._waits_since(self.now_s() - self.unavailable_s):
            try:
                await self.require_engines()
            except NoEngine as error:
                self._fail_since(self.now_s() - self.unavailable_s, str(error))

    def _on_routes(self, group: str, routes: Routes) -> None:
        if group == self._group:
            self.router.update(routes.engines)
            self.refused_models.clear()
            (self._routed.set if self.router.engines else self._routed.clear)()
            self._grant(())


def expire(limit: asyncio.Timeout) -> None:
    """Makes an entered ``asyncio.timeout(None)`` expire now; a second call does nothing."""
    if limit.when() is None:
        limit.reschedule(0)
