"""Runs one request for tokens, in as many attempts as necessary."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from bus.errors import NoEngine, RequestPoisoned, RolloutFailed
from bus.messages import RequestLimits
from trainer_agent._rollouts.attempt import FAILURES, Cut, UnknownModel, pieces, prefill
from trainer_agent._rollouts.choice import ChoiceState
from trainer_agent._rollouts.engine_pool import AttemptWatch
from trainer_agent._rollouts.results import Completion
from trainer_agent._rollouts.text import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    import aiohttp

    from trainer_agent._rollouts.attempt import Piece
    from trainer_agent._rollouts.choice import Tokenizer
    from trainer_agent._rollouts.engine_pool import EnginePool
    from trainer_agent._rollouts.request import RolloutRequest
    from trainer_agent._rollouts.results import Choice, TokenDelta
    from trainer_agent._rollouts.router import EngineLoad

_POISONED: Final = 2
_DECODED_AT_ONCE: Final = 8192  # most tokens that are decoded in the event loop: some 10 ms
_RESTARTS: Final = 10
_ASK_AGAIN_S: Final = 0.5


class RolloutRun:
    """Runs one request until all of its choices are done.

    Args:
        tokenizer: decodes tokens to text; None: no text and no stop strings.
        deliver: called with the new tokens that arrived together. An awaitable that it returns is
            awaited before more of the answer is read. Delivered tokens can't be taken back, so with
            ``deliver`` a choice that has tokens never restarts from the prompt.
    """

    def __init__(
        self,
        request: RolloutRequest,
        pool: EnginePool,
        http: aiohttp.ClientSession,
        tokenizer: Tokenizer | None,
        deliver: Callable[[list[TokenDelta]], Awaitable[None] | None] | None = None,
    ) -> None:
        self._request = request
        self._pool = pool
        self._http = http
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._blamed = _Blamed(request.id, pool)
        self._choices: list[ChoiceState] = []
        self._refused_s: float | None = None  # time of the first of the refused attempts in a row

    async def run(self) -> Completion:
        """Sends attempts until all choices are done.

        Raises:
            UsageError, NoEngine, RequestPoisoned, RolloutFailed: as :meth:`RolloutClient.generate`.
            BusClosed: the client was closed.
        """
        async with self._pool.under_way(self._request.id, self._request.asked_id):
            await self._run()
        choices = self._choices or self._make_choices(RequestLimits())  # aborted before any attempt
        return Completion(self._request.id, self._request.prompt, await _results(choices))

    def _make_choices(self, limits: RequestLimits) -> list[ChoiceState]:
        return [
            ChoiceState(self._request, index, self._tokenizer, limits)
            for index in range(self._request.params.n)
        ]

    async def _run(self) -> None:
        request = self._request
        await self._pool.until_routed()
        limits = self._pool.router.limits_of(len(request.prompt), request.params.max_tokens)
        request.check(limits)
        choices = self._choices = self._make_choices(limits)
        # One HTTP request for all choices, except with prefill and decode engines, where keys and
        # values are handed over for one choice.
        while not (
            self._pool.router.is_split or any(choice.token_ids or choice.done for choice in choices)
        ):
            await self._attempt(choices)
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in choices:
                    if not choice.done:
                        tasks.create_task(self._finish(choice))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _finish(self, choice: ChoiceState) -> None:
        while not choice.done:
            await self._attempt([choice])

    async def _attempt(self, choices: Sequence[ChoiceState]) -> None:
        """Sends one request to an engine: for new choices, or to continue one choice."""
        request, first = self._request, choices[0]
        await asyncio.sleep(max(0.0, first.next_s - self._pool.now_s()))
        load = await self._acquire(len(choices), first.length)
        route, begun_s, prefiller = load.route, self._pool.now_s(), ""
        cut: Cut | None = None
        try:
            try:
                if first.token_ids:
                    self._prepare(first, request.inexact(route.limits))
                begun = [choice.begin_attempt(route.limits) for choice in choices]
                at = first.index, len(choices)
                body = request.body(first.token_ids, *at, begun[0], first.attempts)
                if route.pd_role == "decode" and len(choices) == 1:
                    prefiller = await self._prefill(body)
                await self._read(choices, load, body)
            except Cut as error:
                cut = error
                if cut.how == "unfetched":
                    self._blamed.avoid |= {prefiller}
            except asyncio.CancelledError:
                for choice in choices:
                    choice.end_attempt(route.engine, "abort")
                raise
            for choice in choices:
                try:
                    choice.end_attempt(route.engine, cut.how if cut else "")
                except Cut as error:
                    cut = error
                if choice.done:
                    self._pool.router.succeeded(load)
                choice.pace(begun_s, self._pool.now_s())
            self._judge(choices, load, cut, begun_s)
        finally:
            # Last, because this may assign the engine to a waiting request at once.
            self._pool.release(load, len(choices))
        is_refused = cut is None or cut.how in ("rejected", "unreachable")
        if not is_refused or any(choice.done or choice.gained for choice in choices):
            self._refused_s = None
        elif self._refused_s is None:
            self._refused_s = self._pool.now_s()
        else:
            await self._pool.require_engines(self._refused_s, self._blamed.last)

    async def _acquire(self, sequences: int, length: int) -> EngineLoad:
        """Waits for an engine that takes ``length`` tokens of prompt and output.

        Raises:
            NoEngine: for ``unavailable_s``, all available engines took fewer tokens.
        """
        request, pool = self._request, self._pool
        since_s = pool.now_s()
        while True:
            failed, samplers = self._blamed.avoid, pool.router.samplers
            failed = pool.refused_models.avoiding(failed, request.extra, samplers)
            avoid = pool.router.avoiding(failed, length)
            load = await pool.acquire(request.session_id, sequences, avoid, request.client_id)
            if not load.is_too_short(length):
                return load
            pool.release(load, sequences)
            if pool.now_s() - since_s > pool.unavailable_s:
                raise NoEngine(
                    f"request {request.id} needs an engine that takes {length} tokens; "
                    f"{load.route.engine} takes {load.route.limits.max_model_len}"
                )
            await asyncio.sleep(_ASK_AGAIN_S)

    def _prepare(self, choice: ChoiceState, reasons: Sequence[str]) -> None:
        """Applies ``on_inexact`` to a choice that can't continue exactly for ``reasons``."""
        if not reasons:
            return
        request = self._request
        if request.on_inexact == "continue":
            choice.mark_inexact(reasons)
        elif request.on_inexact == "restart" and self._deliver is None:
            if choice.restarts >= _RESTARTS:
                raise RolloutFailed(
                    f"request {request.id} was interrupted {choice.restarts + 1} times, and "
                    f"restarted from its prompt each time, because of {', '.join(reasons)}; pass "
                    f'on_inexact="continue" to keep its tokens; the last: {self._blamed.last}'
                )
            choice.restart()
        else:
            raise RolloutFailed(
                f"request {request.id} was interrupted, and can't continue exactly because of "
                f"{', '.join(reasons)}; the last: {self._blamed.last}"
            )

    async def _read(
        self, choices: Sequence[ChoiceState], load: EngineLoad, body: dict[str, Any]
    ) -> None:
        """Reads an engine's answer until all choices have ended.

        Raises:
            Cut: the answer ends before that, or the engine lacks a model that others may have.
        """
        engine, pool = load.route.engine, self._pool
        answer = pieces(self._http, load.route.endpoint, body)
        try:
            async with self._watched(load) as attempt, contextlib.aclosing(answer) as stream:
                async for batch in stream:
                    if attempt.limit.when() is not None:  # expired; delivery must not be cancelled
                        raise _stalled(pool)
                    fresh: list[TokenDelta] = []
                    try:
                        if _take(batch, choices, engine, fresh):
                            return
                    finally:
                        if fresh:
                            pool.on_token(attempt)
                            if taken := self._deliver and self._deliver(fresh):
                                await attempt.wait_for_caller(taken)
        except UnknownModel as error:
            raise pool.refused_models.cut(error, body, engine, pool.router.samplers) from None

    async def _prefill(self, body: dict[str, Any]) -> str:
        """Makes a prefill engine compute the prompt; adds ``kv_transfer_params`` to ``body``.

        Returns:
            The prefill engine's name; empty if the decode engine must compute the prompt.
        """
        tried: set[str] = set()
        router, client = self._pool.router, self._request.client_id
        short = router.too_short(len(body["token_ids"]) + 1)
        while load := await self._pool.acquire_prefill(self._blamed.avoid | tried | short, client):
            route, begun_s = load.route, self._pool.now_s()
            try:
                async with self._watched(load) as attempt:
                    body["kv_transfer_params"] = await prefill(self._http, route.endpoint, body)
                    self._pool.on_token(attempt)
            except UnknownModel:
                tried.add(route.engine)
            except Cut as error:
                tried.add(route.engine)
                self._blamed.add(load, error, begun_s)
            else:
                self._pool.router.succeeded(load)
                return route.engine
            finally:
                self._pool.release(load, 1)
        return ""

    @contextlib.asynccontextmanager
    async def _watched(self, load: EngineLoad) -> AsyncIterator[AttemptWatch]:
        """Cancels the block if the engine gives no token for ``stall_s``.

        Raises:
            Cut: the engine has stalled.
        """
        try:
            async with asyncio.timeout(None) as limit:
                now_s, in_order = self._pool.now_s(), not self._request.extra.get("priority")
                attempt = AttemptWatch(load, limit, now_s, now_s, in_order=in_order)
                self._pool.attempts.add(attempt)
                try:
                    yield attempt
                finally:
                    self._pool.attempts.discard(attempt)
        except TimeoutError:
            if not limit.expired():
                raise
            raise _stalled(self._pool) from None

    def _judge(
        self, choices: Sequence[ChoiceState], load: EngineLoad, cut: Cut | None, begun_s: float
    ) -> None:
        """Updates the router after an attempt, and decides whether the request has failed.

        Raises:
            RequestPoisoned, RolloutFailed: the request has failed.
        """
        if cut is not None:
            self._blamed.add(load, cut, begun_s, has_gained=any(each.gained for each in choices))
        elif not any(choice.done or choice.gained for choice in choices):
            self._pool.router.rejected(load, self._pool.now_s())
        if cut is not None and any(choice.failures >= FAILURES for choice in choices):
            raise RolloutFailed(
                f"request {self._request.id}: {FAILURES} attempts in a row gave no token; the "
                f"last: {self._blamed.last}"
            )


def _stalled(pool: EnginePool) -> Cut:
    return Cut("stalled", f"no token for {pool.stall_s:g} s")


def _take(
    batch: Sequence[Piece], choices: Sequence[ChoiceState], engine: str, fresh: list[TokenDelta]
) -> bool:
    """Adds pieces to their choices, and new tokens to ``fresh``.

    Returns:
        Whether all choices have ended.

    Raises:
        Cut: a piece is invalid; ``fresh`` has the tokens before it.
    """
    for piece in batch:
        if not 0 <= piece.index < len(choices):
            raise Cut("broken", f"the answer has choice {piece.index} of {len(choices)}")
        choice = choices[piece.index]
        delta = choice.take(piece, engine)
        if delta is not None:
            fresh.append(delta)
        if choice.has_ended and all(each.has_ended for each in choices):
            return True
    return False


async def _results(choices: Sequence[ChoiceState]) -> tuple[Choice, ...]:
    def make() -> tuple[Choice, ...]:
        return tuple(choice.result() for choice in choices)

    is_long = sum(len(choice.token_ids) for choice in choices) > _DECODED_AT_ONCE
    return await in_thread(make) if is_long else make()


class _Blamed:
    """The engines that failed a request.

    Attributes:
        avoid: their names.
        last: how the last failed attempt ended, and on which engine; for error texts.
    """

    def __init__(self, request_id: str, pool: EnginePool) -> None:
        self._request_id = request_id
        self._pool = pool
        # Engines that died while they ran the request: (name, endpoint, time of death, the engine's
        # `since`).
        self._died: list[tuple[str, str, float, int]] = []
        self.avoid = frozenset[str]()
        self.last = ""

    def add(self, load: EngineLoad, cut: Cut, begun_s: float, *, has_gained: bool = False) -> None:
        """Records a failed attempt; the request avoids its engine afterwards.

        Args:
            begun_s: when the attempt began. Attempts that ran at the same time count as one death.
            has_gained: whether the attempt gave a token. Until an engine gives a token again, or
                returns to the routes, its failures count as the same death.

        Raises:
            RequestPoisoned: two engines have died of the request, or one engine twice.
        """
        engine, endpoint = load.route.engine, load.route.endpoint
        if cut.how in ("rejected", "unreachable", "died"):
            self._pool.router.rejected(load, self._pool.now_s())
        self.last = f"{engine} at {endpoint}: {cut}"
        if cut.how not in ("rejected", "unfetched"):
            self.avoid |= {engine}
        if cut.how != "died" or any(
            (name, url) == (engine, endpoint)
            and (begun_s <= when_s or (load.since == since and not has_gained))
            for name, url, when_s, since in self._died
        ):
            return
        self._died.append((engine, endpoint, self._pool.now_s(), load.since))
        if len(self._died) >= _POISONED:
            names = ", ".join(sorted(name for name, *_ in self._died))
            raise RequestPoisoned(
                f"request {self._request_id}: {names} failed while they ran it, so no other engine "
                f"gets this request; the last: {self.last}"
            )
