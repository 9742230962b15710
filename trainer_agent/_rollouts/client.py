"""The rollout client: generates tokens despite updates, pauses, preemption and dead engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import aiohttp

from bus._ids import check_name
from bus._keys import API_KEY_VARIABLE, security
from bus._runtime.peer import default_name
from bus._settings import DEFAULT_BROKER
from bus.errors import UsageError
from trainer_agent._connection import Connection
from trainer_agent._rollouts.chat import ChatClient
from trainer_agent._rollouts.engine_pool import EnginePool
from trainer_agent._rollouts.engine_survey import count_workers
from trainer_agent._rollouts.request import make_request, plain_params
from trainer_agent._rollouts.rollout import RolloutRun

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from pathlib import Path

    from aiohttp.connector import AddrInfoType

    from bus._net import Broker
    from trainer_agent._rollouts.choice import Tokenizer
    from trainer_agent._rollouts.request import OnInexact
    from trainer_agent._rollouts.results import Completion, TokenDelta

T = TypeVar("T")

# A request is lost if the server closes its connection at the moment of reuse. So idle connections
# are closed before the server does (vLLM: after 5 s).
_IDLE_S: Final = 2.0
_CONNECT_S: Final = 5.0
# Buffers for an answer whose caller is slow; the rest of the answer waits in the engine.
_UNREAD_BYTES: Final = 1 << 14
_UNREAD_IN_KERNEL_BYTES: Final = 1 << 17


class RolloutClient(ChatClient):
    """Generates tokens on the engines of one group.

    ::

        async with RolloutClient("tcp://127.0.0.1:7710", group="policy") as rollouts:
            done = await rollouts.generate([5, 9, 77], {"max_tokens": 64, "logprobs": 0})
            print(done.choices[0].token_ids, done.choices[0].spans)

    An interrupted request continues after its last token, on another routable engine if necessary.
    Requests wait while no engine is routable. While the broker is gone, the last routes are used.

    Args:
        broker: as in :class:`trainer_agent.TrainerAgent`.
        group: the group of engines.
        name: this client's name on the bus. Default: host, pid, and a random part.
        tokenizer: decodes tokens into text; needed for stop strings.
        stall_s: how long a running engine may take for the next token, in seconds. After that the
            request moves to another engine.
        unavailable_s: how long a request waits for a routable engine, in seconds.
        timeout_s: how long the broker may take to accept the join, in seconds.
        api_key: the engines' API key, if they need one. Default: VLLM_API_KEY.
        key: as in :class:`trainer_agent.TrainerAgent`.
        broker_key: as in :class:`trainer_agent.TrainerAgent`.
        insecure: as in :class:`trainer_agent.TrainerAgent`.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        broker: Broker = DEFAULT_BROKER,
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
        self.broker = broker
        self.group = check_name(group, "group")
        self._tokenizer = tokenizer
        api_key = api_key or os.environ.get(API_KEY_VARIABLE)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        name = check_name(name or f"{default_name('rollouts')}-{secrets.token_hex(3)}", "name")
        self._connection = Connection(
            broker,
            role="observer",
            name=name,
            group=self.group,
            timeout_s=timeout_s,
            security=security(key, broker_key, insecure=insecure),
        )
        self._pool = EnginePool(
            self.group, self._connection, stall_s=stall_s, unavailable_s=unavailable_s
        )
        self._stack = contextlib.AsyncExitStack()
        self._http: aiohttp.ClientSession | None = None

    async def connect(self) -> Self:
        """Joins the bus; returns when the broker has accepted the join.

        Raises:
            BusTimeout: no broker answers.
            Refused: the broker refuses the join.
        """
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(_make_session(self._headers))
            await self._pool.open()
            stack.callback(self._pool.close)  # first, because that ends the requests
            self._http = http
            self._stack = stack.pop_all()
        return self

    async def close(self) -> None:
        """Leaves the bus; requests under way raise ``BusClosed``."""
        self._http = None
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
        client_id: str = "",
        request_id: str = "",
        on_inexact: OnInexact = "restart",
        on_delta: Callable[[TokenDelta], None] | None = None,
        on_deltas: Callable[[list[TokenDelta]], Awaitable[None]] | None = None,
        **extra: Any,
    ) -> Completion:
        """Generates ``n`` choices for one prompt.

        Args:
            prompt_token_ids: the prompt.
            sampling_params: see :class:`~trainer_agent._rollouts.request.SamplingParameters`.
            session_id: requests of one session go to the same engine, whose cache has their prefix.
            client_id: the client on whose behalf you ask; waiting clients take turns.
            request_id: your own id of the request, for :meth:`abort_requests`.
            on_inexact: what to do if an interrupted request can't continue exactly: ``restart`` it
                from its prompt, ``continue`` and name the reasons in ``Choice.inexact``, or
                ``raise``.
            on_delta: called with each :class:`TokenDelta`, as :meth:`stream` yields them.
            on_deltas: awaited with all deltas that arrived together. No more of the engine's
                answer is read meanwhile: the tokens of a slow caller wait in the engine.
            extra: other fields of vLLM's request, such as ``cache_salt``, ``priority``, ``model``.

        Returns:
            All choices, with the engine and the weight version of each token.

        Raises:
            UsageError: the request can't be served; the text names the field at fault.
            NoEngine: no engine was available in time.
            RequestPoisoned: engines died twice while they ran the request.
            RolloutFailed: five attempts in a row gave no token; the request has restarted ten
                times; or ``on_inexact="raise"`` applied.
        """
        http = self._session()
        request = make_request(
            prompt_token_ids,
            sampling_params,
            session_id=session_id,
            client_id=client_id,
            asked_id=request_id,
            on_inexact=on_inexact,
            decodes=self._tokenizer is not None,
            extra=extra,
        )
        deliver = on_deltas if on_delta is None else partial(_each, on_delta)
        return await RolloutRun(request, self._pool, http, self._tokenizer, deliver).run()

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        client_id: str = "",
        on_inexact: OnInexact = "continue",
        **extra: Any,
    ) -> AsyncGenerator[TokenDelta]:
        """Generates as :meth:`generate` does, and yields new tokens as they arrive.

        Yielded tokens can't be taken back, so ``on_inexact="restart"`` only restarts a choice
        without tokens, and raises otherwise.
        """
        deltas: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        task = asyncio.create_task(
            self.generate(
                *(prompt_token_ids, sampling_params),
                session_id=session_id,
                client_id=client_id,
                on_inexact=on_inexact,
                on_delta=deltas.put_nowait,
                **extra,
            )
        )
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
        progress: bool = False,
        on_inexact: OnInexact = "restart",
        **extra: Any,
    ) -> AsyncGenerator[tuple[int, Completion]]:
        """Generates for many prompts. An error of one prompt cancels the others.

        While requests wait for engines, each call of this method takes turns with other calls.

        Args:
            prompts: token ids of each prompt.
            sampling_params: as :meth:`generate`. If it has a ``seed``, prompt ``i`` gets the seed
                ``seed + i * n``.
            concurrency: the greatest number of prompts in flight.
            as_completed: whether to yield in the order of completion, not of the prompts.
            progress: whether to show a tqdm progress bar.
            on_inexact: as :meth:`generate`.
            extra: as :meth:`generate`.

        Yields:
            The index of a prompt, and its completion.

        Raises:
            UsageError: also if ``progress`` is set and tqdm is not installed.
        """
        if concurrency < 1:
            raise UsageError(f"concurrency={concurrency}: must be at least 1")
        seed, n = (params := plain_params(sampling_params)).get("seed"), params.get("n", 1)
        bar = _progress_bar(prompts) if progress else None
        extra.setdefault("client_id", f"generate_many {secrets.token_hex(4)}")

        async def one(index: int, prompt: Sequence[int]) -> tuple[int, Completion]:
            own = params if seed is None else {**params, "seed": seed + index * n}
            done = await self.generate(prompt, own, on_inexact=on_inexact, **extra)
            if bar is not None:
                bar.update()
            return index, done

        try:
            works = (one(index, prompt) for index, prompt in enumerate(prompts))
            async with contextlib.aclosing(_run(works, concurrency, as_completed)) as done:
                async for each in done:
                    yield each
        finally:
            if bar is not None:
                bar.close()

    async def count_workers(self, *, include_dp: bool = True) -> int:
        """Returns how many vLLM workers would join a new transport.

        Args:
            include_dp: whether all ranks of a DP group count; otherwise only its first rank does.

        Raises:
            Refused: the group has no engine that is ready.
            BusTimeout: the broker does not answer.
        """
        return await count_workers(self._connection, include_dp=include_dp)

    def finish_session(self, session_id: str) -> None:
        """Ends the session ``session_id``, so that its engine has room for another session."""
        self._pool.router.finish_session(session_id)


def _make_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_IDLE_S, socket_factory=_make_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        headers=headers,
        read_bufsize=_UNREAD_BYTES,
    )


def _make_socket(address: AddrInfoType) -> socket.socket:
    """Makes a socket with a small receive buffer: unread tokens wait in the engine."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNREAD_IN_KERNEL_BYTES)
    return made


def _each(act: Callable[[TokenDelta], None], deltas: Iterable[TokenDelta]) -> None:
    for delta in deltas:
        act(delta)


async def _run(
    works: Iterator[Coroutine[Any, Any, T]], concurrency: int, as_completed: bool
) -> AsyncGenerator[T]:
    """Runs coroutines, at most ``concurrency`` at a time; yields their results."""
    under_way: OrderedDict[asyncio.Task[T], None] = OrderedDict()
    ended: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    try:
        while True:
            while len(under_way) < concurrency and (work := next(works, None)) is not None:
                task = asyncio.create_task(work)
                under_way[task] = None
                if as_completed:
                    task.add_done_callback(ended.put_nowait)
            if not under_way:
                return
            task = await ended.get() if as_completed else next(iter(under_way))
            await asyncio.wait([task])
            del under_way[task]
            yield task.result()
    finally:
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)


def _progress_bar(prompts: Iterable[Sequence[int]]) -> Any:
    try:
        from tqdm.auto import tqdm  # noqa: PLC0415 - installed or not
    except ImportError:
        raise UsageError("progress: needs tqdm, which is not installed: pip install tqdm") from None
    return tqdm(total=len(prompts) if isinstance(prompts, Sized) else None, unit="prompt")
