"""Assigns engines to the requests of one client, and queues requests while all are busy."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bus.errors import NoEngine, WavebusError
from trainer_agent.rollouts.router import Router

if TYPE_CHECKING:
    from bus.messages import EngineView, Routes
    from trainer_agent.connection import Connection
    from trainer_agent.rollouts.router import EngineLoad

_SERVING: Final = ("running", "staging")
_FIGURES_S: Final = 0.5


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request that waits for an engine."""

    session: str | None
    sequences: int
    avoid: frozenset[str]
    granted: asyncio.Future[EngineLoad | None]


@dataclass(eq=False, slots=True)
class AttemptWatch:
    """An attempt under way, watched for stalls.

    Attributes:
        engine: the engine's name.
        limit: the attempt's timeout; expires after ``stall_s`` without a token of a running engine.
        last_s: when the last token arrived, on the event loop's clock.
    """

    engine: str
    limit: asyncio.Timeout
    last_s: float


class EnginePool:
    """Assigns the routable engines of a group to requests, and watches for stalled engines.

    Args:
        group: the group.
        connection: the rollout client's connection to the broker.
        stall_s: how long a running engine may take for the next token, in seconds; then the attempt
            is cancelled.
        unavailable_s: how long a request waits while no engine is available, in seconds.

    Attributes:
        attempts: the attempts under way.
        requests: the timeout of each request under way; all expire when the pool is closed.
    """

    def __init__(
        self,
        group: str,
        connection: Connection,
        *,
        stall_s: float,
        unavailable_s: float,
    ) -> None:
        self.router = Router()
        self.attempts: set[AttemptWatch] = set()
        self.requests: set[asyncio.Timeout] = set()
        self.stall_s = stall_s
        self._group = group
        self._unavailable_s = unavailable_s
        self._connection = connection
        connection.on_routes = self._on_routes
        self._routed = asyncio.Event()
        self._waiting: deque[_Waiter] = deque()
        self._for_prefill: deque[_Waiter] = deque()  # requests that have a decode engine
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._last_token_s = 0.0

    async def open(self) -> None:
        """Joins the bus; returns when the broker has accepted the join.

        Raises:
            BusTimeout: no broker answers.
            Refused: the broker refuses the join.
        """
        await self._connection.open()
        self._last_token_s = self.now_s()
        self._watch = asyncio.create_task(self._watch_engines())

    def close(self) -> None:
        """Leaves the bus, and cancels all requests under way."""
        for limit in self.requests:
            expire(limit)
        self._connection.close()
        self._stop_timer()
        if self._watch is not None:
            self._watch.cancel()

    def on_token(self, attempt: AttemptWatch) -> None:
        """Records that an attempt has received a token."""
        attempt.last_s = self._last_token_s = self.now_s()

    async def acquire(
        self, session: str | None, sequences: int, avoid: frozenset[str]
    ) -> EngineLoad:
        """Waits for the request's turn, and returns its engine.

        Args:
            session: the request's session, or None.
            sequences: how many sequences the request has.
            avoid: names of engines that failed the request, used only if there are no others.

        Raises:
            NoEngine: no engine was available in time.
        """
        load = await self._wait(self._waiting, session, sequences, avoid)
        assert load is not None
        return load

    async def acquire_prefill(self, avoid: frozenset[str]) -> EngineLoad | None:
        """Waits until a prefill engine can take one sequence, and reserves a place there.

        Args:
            avoid: names of engines that must not be chosen.

        Returns:
            The engine; None if no prefill engine remains beside those to avoid.

        Raises:
            NoEngine: some remain, but none could be used in time, as in :meth:`acquire`.
        """
        return await self._wait(self._for_prefill, None, 1, avoid)

    async def _wait(
        self,
        waiting: deque[_Waiter],
        session: str | None,
        sequences: int,
        avoid: frozenset[str],
    ) -> EngineLoad | None:
        waiter = _Waiter(session, sequences, avoid, asyncio.get_running_loop().create_future())
        waiting.append(waiter)
        self._grant()
        try:
            while not waiter.granted.done():
                await asyncio.wait([waiter.granted], timeout=self._unavailable_s)
                if not waiter.granted.done():
                    await self.require_engines()
            return waiter.granted.result()
        except BaseException:
            if not waiter.granted.done():
                waiting.remove(waiter)
            elif (load := waiter.granted.result()) is not None:
                self.release(load, sequences)
            raise

    async def until_routed(self) -> None:
        """Waits until an engine is routable.

        Raises:
            NoEngine: as :meth:`acquire`.
        """
        while not self.router.engines:
            try:
                await asyncio.wait_for(self._routed.wait(), self._unavailable_s)
            except TimeoutError:
                await self.require_engines()

    def release(self, load: EngineLoad, sequences: int) -> None:
        """Frees an engine's slots after an attempt, and assigns them to waiting requests.

        Args:
            load: the engine, from :meth:`acquire`.
            sequences: how many sequences the attempt had.
        """
        self.router.release(load, sequences)
        self._grant()

    def _grant(self) -> None:
        """Assigns engines to waiting requests, in the order of their arrival."""
        now_s = self.now_s()
        for waiter in list(self._for_prefill):
            load = self.router.pick_prefill(now_s, waiter.avoid)
            if load is not None or not self.router.prefills(waiter.avoid):
                self._for_prefill.remove(waiter)
                waiter.granted.set_result(load)
            elif not waiter.avoid:
                break
        for waiter in list(self._waiting):
            if not any(load.has_room(1, now_s) for load in self.router.samplers.values()):
                break
            load = self.router.pick(waiter.session, waiter.sequences, now_s, waiter.avoid)
            if load is not None:
                self._waiting.remove(waiter)
                waiter.granted.set_result(load)
            elif waiter.session is None and not waiter.avoid:
                break  # later ones with fewer sequences would take each place that becomes free
        self._stop_timer()
        release_s = self.router.next_release_s(now_s)
        if (self._waiting or self._for_prefill) and release_s is not None:
            self._timer = asyncio.get_running_loop().call_later(release_s - now_s, self._grant)

    async def require_engines(self, since_s: float = 0.0, last: str = "") -> None:
        """Checks that an engine generates tokens, or will after a pause.

        Args:
            since_s: when engines began to refuse a request. Nothing is checked until
                ``unavailable_s`` have passed since then and since the last token of any request.
            last: how the last engine refused the request, for the error's text.

        Raises:
            NoEngine: there is none; the text names the group's engines.
        """
        if self.now_s() - max(since_s, self._last_token_s) < self._unavailable_s:
            return
        known = sorted(self.router.engines) or ["none"]
        try:
            engines = await self._connection.engines()
        except WavebusError as error:
            raise NoEngine(
                f"no engine took a request for {self._unavailable_s:g} s; the last routes: "
                f"{', '.join(known)}; {error}"
            ) from None
        if any(engine.phase not in _SERVING for engine in engines):
            return
        there = ", ".join(f"{each.name} at {each.endpoint or 'no endpoint'}" for each in engines)
        raise NoEngine(
            f"no engine took a request for {self._unavailable_s:g} s; in group {self._group}: "
            f"{there or 'nobody'}; routed: {', '.join(known)}" + f"; the last: {last}" * bool(last)
        )

    async def _watch_engines(self) -> None:
        """Reads the engines' loads, and cancels attempts to which running engines give no tokens.

        Runs until cancelled.
        """
        while True:
            await asyncio.sleep(min(_FIGURES_S, self.stall_s / 4))
            engines: tuple[EngineView, ...] = ()
            if self.attempts:
                with contextlib.suppress(WavebusError):
                    engines = await self._connection.engines()
            idle = {engine.name for engine in engines if engine.phase not in _SERVING}
            self.router.take_figures(each for each in engines if each.name not in idle)
            now_s = self.now_s()
            for attempt in self.attempts:
                if attempt.engine in idle:
                    attempt.last_s = now_s
                elif attempt.last_s < now_s - self.stall_s:
                    expire(attempt.limit)

    def _on_routes(self, group: str, routes: Routes) -> None:
        if group == self._group:
            self.router.update(routes.engines)
            (self._routed.set if self.router.engines else self._routed.clear)()
            self._grant()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def now_s(self) -> float:
        """Returns the time in seconds, on the clock of event loops."""
        return time.monotonic()


def expire(limit: asyncio.Timeout) -> None:
    """Makes an entered ``asyncio.timeout(None)`` expire now; a second call does nothing."""
    if limit.when() is None:
        limit.reschedule(0)
