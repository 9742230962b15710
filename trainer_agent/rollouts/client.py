"""The rollout client: generation that survives updates, pauses, preemption and dead engines."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import anyio

from bus.errors import BusTimeout, NoEngine, Refused, RequestPoisoned, RolloutFailed, UsageError
from bus.ids import check_name
from bus.keys import security
from bus.runtime.peer import default_name
from bus.settings import DEFAULT_BROKER
from trainer_agent.connection import Connection
from trainer_agent.rollouts.attempt import Cut, pieces
from trainer_agent.rollouts.choice import ChoiceState
from trainer_agent.rollouts.request import make_request
from trainer_agent.rollouts.results import Completion
from trainer_agent.rollouts.router import Router

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from bus.messages import Routes
    from trainer_agent.rollouts.choice import Tokenizer
    from trainer_agent.rollouts.request import OnInexact, RolloutRequest
    from trainer_agent.rollouts.results import TokenDelta

# A connection that the server closes at the moment of its reuse loses a request: let go of idle
# ones before servers do (after 5 s, vLLM's).
_IDLE_S: Final = 2.0
_CONNECT_S: Final = 5.0
_LINE_BYTES: Final = 1 << 20
_FAILURES: Final = 5
_POISONED: Final = 2
_SERVING: Final = ("running", "staging")


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request that waits for an engine."""

    session: str | None
    sequences: int
    avoid: frozenset[str]
    granted: asyncio.Future[str]


@dataclass(eq=False, slots=True)
class _Attempt:
    """One that is under way; the watch cancels ``scope`` when no token came since ``last_s``."""

    engine: str
    scope: anyio.CancelScope
    last_s: float


@dataclass(eq=False, slots=True)
class _Rollout:
    """A request under way, and what became of its attempts. ``died``: engines that died while they
    ran it, by name and endpoint; ``avoid``: engines that failed it."""

    request: RolloutRequest
    on_delta: Callable[[TokenDelta], None] | None
    died: set[tuple[str, str]] = field(default_factory=set)
    avoid: set[str] = field(default_factory=set)
    last: str = ""  # what ended the last attempt that failed, and where


class RolloutClient:
    """Generates tokens on the engines of one group.

    ::

        async with RolloutClient("tcp://127.0.0.1:7710", group="policy") as rollouts:
            done = await rollouts.generate([5, 9, 77], {"max_tokens": 64, "logprobs": 0})
            print(done.choices[0].token_ids, done.choices[0].spans)

    A request goes on where it was interrupted, on whichever engine is routed; see
    :class:`~trainer_agent.rollouts.router.Router` for which. While all engines are paused, asleep
    or stale, requests wait. If the broker is gone, the last routes stay in use.

    Args:
        broker: the broker's address.
        group: whose engines.
        name: this client's name on the bus. Default: from host and pid, and a random part.
        tokenizer: decodes texts, and is needed for stop strings.
        stall_s: an engine that runs, and gives a request no token for so long, is left.
        unavailable_s: how long a request waits while no engine is there.
        timeout_s: how long the broker may take to let the client in.
        api_key: of the engines, if they need one.
        key, broker_key, insecure: as for :class:`trainer_agent.TrainerAgent`.
    """

    def __init__(
        self,
        broker: str = DEFAULT_BROKER,
        *,
        group: str = "policy",
        name: str | None = None,
        tokenizer: Tokenizer | None = None,
        stall_s: float = 60.0,
        unavailable_s: float = 60.0,
        timeout_s: float = 30.0,
        api_key: str | None = None,
        key: Path | str | None = None,
        broker_key: Path | str | None = None,
        insecure: bool = False,
    ) -> None:
        for option, value in (("stall_s", stall_s), ("unavailable_s", unavailable_s)):
            if value <= 0:
                raise UsageError(f"{option}={value}: must be positive")
        self.group = check_name(group, "group")
        self._tokenizer = tokenizer
        self._stall_s = stall_s
        self._unavailable_s = unavailable_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connection = Connection(
            broker,
            role="observer",
            name=check_name(name or f"{default_name('rollouts')}-{secrets.token_hex(3)}", "name"),
            group=self.group,
            timeout_s=timeout_s,
            security=security(key, broker_key, insecure=insecure),
            on_routes=self._on_routes,
        )
        self._router = Router()
        self._routed = asyncio.Event()
        self._waiting: deque[_Waiter] = deque()
        self._attempts: set[_Attempt] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_token_s = 0.0
        self._stack = contextlib.AsyncExitStack()
        self._http: aiohttp.ClientSession | None = None

    async def connect(self) -> Self:
        """Join the bus.

        Raises:
            BusTimeout: no broker answers.
            Refused: it does not let the client in.
        """
        async with contextlib.AsyncExitStack() as stack:
            await self._connection.open()
            stack.callback(self._connection.close)
            self._http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                    headers=self._headers,
                    read_bufsize=_LINE_BYTES,
                )
            )
            watch = asyncio.create_task(self._watch_stalls())
            stack.callback(watch.cancel)
            stack.callback(self._stop_timer)
            self._last_token_s = self._now_s()
            self._stack = stack.pop_all()
        return self

    async def close(self) -> None:
        """Leave the bus; requests that are under way end."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        on_inexact: OnInexact = "restart",
        **extra: Any,
    ) -> Completion:
        """Generate ``n`` choices.

        Args:
            prompt_token_ids: the prompt.
            sampling_params: see :class:`~trainer_agent.rollouts.request.SamplingParameters`.
            session_id: requests of one session go to one engine, whose cache has their prefix.
            on_inexact: what to do if an interrupted request can't continue exactly: ``restart`` it
                from its prompt, ``continue`` and name the reasons in ``Choice.inexact``, or
                ``raise``.
            extra: other fields of vLLM's request: ``cache_salt``, ``priority``, ``model``.

        Raises:
            UsageError: the request can't be served; names the field at fault.
            NoEngine: nobody is there to take it.
            RequestPoisoned: two engines died while they ran it.
            RolloutFailed: five attempts in a row gave no token, or ``on_inexact="raise"``.
        """
        request = self._make(prompt_token_ids, sampling_params, session_id, on_inexact, extra)
        return await self._run(_Rollout(request, None))

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        on_inexact: OnInexact = "continue",
        **extra: Any,
    ) -> AsyncGenerator[TokenDelta]:
        """The same, token by token as they come. What was given can't be taken back, so
        ``on_inexact="restart"`` restarts only a choice that has given no token yet, and raises
        otherwise. Arguments and errors are those of :meth:`generate`."""
        request = self._make(prompt_token_ids, sampling_params, session_id, on_inexact, extra)
        deltas: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        task = asyncio.create_task(self._run(_Rollout(request, deltas.put_nowait)))
        task.add_done_callback(lambda _: deltas.put_nowait(None))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def generate_many(
        self,
        prompts: Iterable[Sequence[int]],
        sampling_params: Mapping[str, Any],
        *,
        concurrency: int = 256,
        as_completed: bool = False,
        on_inexact: OnInexact = "restart",
        **extra: Any,
    ) -> AsyncGenerator[tuple[int, Completion]]:
        """Generate for many prompts, at most ``concurrency`` at a time.

        Yields the index of a prompt and its completion, in the order of the prompts, or
        ``as_completed``. With a ``seed``, each prompt draws from its own: ``seed`` plus its index
        times ``n``. Errors are those of :meth:`generate`; one ends the others.
        """
        if concurrency < 1:
            raise UsageError(f"concurrency={concurrency}: must be at least 1")
        seed, n = sampling_params.get("seed"), sampling_params.get("n", 1)
        numbered = enumerate(prompts)
        under_way: deque[asyncio.Task[tuple[int, Completion]]] = deque()

        async def one(index: int, prompt: Sequence[int]) -> tuple[int, Completion]:
            own = sampling_params if seed is None else {**sampling_params, "seed": seed + index * n}
            return index, await self.generate(prompt, own, on_inexact=on_inexact, **extra)

        try:
            while True:
                while len(under_way) < concurrency and (more := next(numbered, None)):
                    under_way.append(asyncio.create_task(one(*more)))
                if not under_way:
                    return
                waited = list(under_way) if as_completed else [under_way[0]]
                ended, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    under_way.remove(task)
                    yield task.result()
        finally:
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way)

    def finish_session(self, session_id: str) -> None:
        """Forget a session: its engine may take another."""
        self._router.finish_session(session_id)

    # One request

    def _make(
        self,
        prompt: Sequence[int],
        params: Mapping[str, Any],
        session_id: str | None,
        on_inexact: OnInexact,
        extra: Mapping[str, Any],
    ) -> RolloutRequest:
        if self._http is None:
            raise UsageError("connect() first, or use `async with`")
        return make_request(
            prompt,
            params,
            session_id=session_id,
            on_inexact=on_inexact,
            decodes=self._tokenizer is not None,
            extra=extra,
        )

    async def _run(self, rollout: _Rollout) -> Completion:
        request = rollout.request
        await self._until_routed()
        limits = self._router.limits()
        request.check(limits)
        choices = [
            ChoiceState(request, index, self._tokenizer, limits)
            for index in range(request.params.n)
        ]
        while not any(choice.token_ids or choice.done for choice in choices):
            await self._attempt(rollout, choices)
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in choices:
                    if not choice.done:
                        tasks.create_task(self._finish(rollout, choice))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return Completion(request.id, request.prompt, tuple(choice.result() for choice in choices))

    async def _finish(self, rollout: _Rollout, choice: ChoiceState) -> None:
        """Attempts for one choice, until it is done."""
        while not choice.done:
            await self._attempt(rollout, [choice])

    async def _attempt(self, rollout: _Rollout, choices: Sequence[ChoiceState]) -> None:
        """Ask one engine for these choices: all from the start, or one from where it is."""
        request, first = rollout.request, choices[0]
        engine = await self._acquire(request.session_id, len(choices), frozenset(rollout.avoid))
        route = self._router.engines[engine].route
        cut: Cut | None = None
        try:
            if first.token_ids:
                self._prepare(rollout, first, request.inexact(route.limits))
            body = request.body(
                first.token_ids, first.index, len(choices), route.limits, first.attempts
            )
            await self._read(rollout, choices, engine, route.endpoint, body)
        except Cut as error:
            cut = error
        finally:
            self._router.release(engine, len(choices))
            self._grant()
        for choice in choices:
            try:
                choice.end_attempt(engine, cut.how if cut else "")
            except Cut as error:
                cut = error
            if choice.done:
                self._router.succeeded(engine)
        self._judge(rollout, choices, engine, route.endpoint, cut)

    def _prepare(self, rollout: _Rollout, choice: ChoiceState, reasons: Sequence[str]) -> None:
        """Decide how a choice that has tokens goes on."""
        if not reasons:
            return
        request = rollout.request
        if request.on_inexact == "continue":
            choice.mark_inexact(reasons)
        elif request.on_inexact == "restart" and rollout.on_delta is None:
            choice.restart()
        else:
            raise RolloutFailed(
                f"request {request.id} was interrupted, and can't continue exactly: "
                f"{', '.join(reasons)}; {rollout.last}"
            )

    async def _read(
        self,
        rollout: _Rollout,
        choices: Sequence[ChoiceState],
        engine: str,
        endpoint: str,
        body: dict[str, Any],
    ) -> None:
        """Take what an engine answers, until it has ended.

        Raises:
            Cut: before that.
        """
        assert self._http is not None
        alone = len(choices) == 1
        with anyio.CancelScope() as scope:
            attempt = _Attempt(engine, scope, self._now_s())
            self._attempts.add(attempt)
            try:
                async with contextlib.aclosing(pieces(self._http, endpoint, body)) as stream:
                    async for batch in stream:
                        for piece in batch:
                            if not 0 <= piece.index < len(choices):
                                raise Cut("broken", f"choice {piece.index} of {len(choices)}")
                            choice = choices[0 if alone else piece.index]
                            delta = choice.take(piece, engine)
                            if delta is not None:
                                attempt.last_s = self._last_token_s = self._now_s()
                                if rollout.on_delta is not None:
                                    rollout.on_delta(delta)
                        if all(choice.has_ended for choice in choices):
                            return
            finally:
                self._attempts.discard(attempt)
        if scope.cancelled_caught:
            raise Cut("stalled", f"no token for {self._stall_s:g} s")

    def _judge(
        self,
        rollout: _Rollout,
        choices: Sequence[ChoiceState],
        engine: str,
        endpoint: str,
        cut: Cut | None,
    ) -> None:
        """What an attempt's end means for its engine and its request.

        Raises:
            RequestPoisoned, RolloutFailed: it is given up.
        """
        if cut is None:
            if not any(choice.done or choice.token_ids for choice in choices):
                self._router.rejected(engine, self._now_s())  # ended before it began
            return
        rollout.last = f"{engine} at {endpoint}: {cut}"
        if cut.how in ("rejected", "unreachable", "died"):
            self._router.rejected(engine, self._now_s())
        if cut.how in ("died", "broken", "stalled"):
            rollout.avoid.add(engine)
        if cut.how == "died":
            rollout.died.add((engine, endpoint))
            if len(rollout.died) >= _POISONED:
                names = ", ".join(sorted(name for name, _ in rollout.died))
                raise RequestPoisoned(
                    f"request {rollout.request.id}: {names} died while they ran it, so no other "
                    f"engine gets it; the last: {rollout.last}"
                )
        if any(choice.failures >= _FAILURES for choice in choices):
            raise RolloutFailed(
                f"request {rollout.request.id}: {_FAILURES} attempts in a row gave no token; the "
                f"last: {rollout.last}"
            )

    # Engines

    async def _acquire(self, session: str | None, sequences: int, avoid: frozenset[str]) -> str:
        """The engine that a request goes to, when it is its turn.

        Raises:
            NoEngine: there is none.
        """
        waiter = _Waiter(session, sequences, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            while not waiter.granted.done():
                await asyncio.wait([waiter.granted], timeout=self._unavailable_s)
                if not waiter.granted.done():
                    await self._require_engines()
            return waiter.granted.result()
        except BaseException:
            if waiter.granted.done():
                self._router.release(waiter.granted.result(), sequences)
            else:
                self._waiting.remove(waiter)
            self._grant()
            raise

    async def _until_routed(self) -> None:
        while not self._router.engines:
            try:
                await asyncio.wait_for(self._routed.wait(), self._unavailable_s)
            except TimeoutError:
                await self._require_engines()

    def _grant(self) -> None:
        """Let those go whose turn it is, in the order in which they came."""
        now_s = self._now_s()
        for waiter in list(self._waiting):
            if not any(load.has_room(1, now_s) for load in self._router.engines.values()):
                break
            engine = self._router.pick(waiter.session, waiter.sequences, now_s, waiter.avoid)
            if engine is not None:
                self._waiting.remove(waiter)
                waiter.granted.set_result(engine)
        self._stop_timer()
        release_s = self._router.next_release_s(now_s)
        if self._waiting and release_s is not None:
            self._timer = asyncio.get_running_loop().call_at(release_s, self._grant)

    async def _require_engines(self) -> None:
        """After a long wait: go on waiting if somebody works, or will.

        Raises:
            NoEngine: otherwise; it says who was waited for.
        """
        if self._now_s() - self._last_token_s < self._unavailable_s:
            return
        known = sorted(self._router.engines) or ["none"]
        try:
            engines = await self._connection.engines()
        except (BusTimeout, Refused) as error:
            raise NoEngine(
                f"no engine took a request for {self._unavailable_s:g} s; the last routes: "
                f"{', '.join(known)}; {error}"
            ) from None
        if any(engine.phase not in _SERVING for engine in engines):
            return
        there = ", ".join(f"{each.name} at {each.endpoint or 'no endpoint'}" for each in engines)
        raise NoEngine(
            f"no engine took a request for {self._unavailable_s:g} s; in group {self.group}: "
            f"{there or 'nobody'}; routed: {', '.join(known)}"
        )

    async def _watch_stalls(self) -> None:
        """Leave engines that run, and give no tokens."""
        while True:
            await asyncio.sleep(self._stall_s / 4)
            since_s = self._now_s() - self._stall_s
            if not any(attempt.last_s < since_s for attempt in self._attempts):
                continue
            with contextlib.suppress(BusTimeout, Refused):
                idle = {e.name for e in await self._connection.engines() if e.phase not in _SERVING}
                for attempt in self._attempts:
                    if attempt.engine in idle:
                        attempt.last_s = self._now_s()
            for attempt in self._attempts:
                if attempt.last_s < since_s:
                    attempt.scope.cancel()

    def _on_routes(self, group: str, routes: Routes) -> None:
        if group == self.group:
            self._router.update(routes.engines)
            (self._routed.set if routes.engines else self._routed.clear)()
            self._grant()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
