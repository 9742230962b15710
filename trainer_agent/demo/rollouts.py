"""Rollouts: requests to the engines without end, several at a time, in a thread of their own.

Engines are asked for tokens over HTTP, the route of vLLM and of the embedded engine
alike. Nothing here knows of updates: a request that one interrupts just goes on.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp

from bus.errors import WavebusError
from bus.rejection import is_rejected
from trainer_agent.demo import task
from trainer_agent.demo.learner import Rollout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ROUTE: Final = "/inference/v1/generate"
_DATA: Final = b"data: "
_END: Final = b"data: [DONE]"
_PATIENCE_S: Final = 120.0
IDLE_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.1


@dataclass(slots=True)
class Counts:
    """What became of the requests. One that lacks a sequence, or a part of one, is lost;
    one that is ``left_out`` came back whole, and too early for a trainer still at work; one that
    was ``cut_short`` is asked again: its engine was killed. ``aborted``, where there are faults:
    the endpoints of requests that engines ended, with when each began and ended (wall clock, s).
    ``longest_token_gap_ms`` is the longest time between two tokens of one sequence, as they arrive
    here. One stream per engine is measured."""

    requests: int = 0
    lost: int = 0
    cut_short: Counter[str] = field(default_factory=Counter)
    aborted: list[tuple[str, float, float]] = field(default_factory=list)
    left_out: int = 0
    why_lost: Counter[str] = field(default_factory=Counter)
    tokens_by_version: Counter[int] = field(default_factory=Counter)
    longest_token_gap_ms: float = 0.0


class RolloutPool:
    """Keeps ``streams`` requests under way on each engine, always; finished groups queue up.

    The newest ``ahead`` groups wait for the trainer; when it is slow, older ones are left
    out, so that what it takes is never very stale. A context manager, for one thread.

    ``whole`` is called with every sequence that came back whole. With ``faults``, engines are
    killed, of which :meth:`killing` tells, and quarantined, which ends requests by ``abort``:
    whoever knows when, judges those.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        group_size: int,
        streams: int,
        ahead: int,
        seed: int,
        faults: bool = False,
        whole: Callable[[Rollout], None] = lambda _: None,
    ) -> None:
        self.counts = Counts()
        self._faults = faults
        self._whole = whole
        self._kills: Counter[str] = Counter()  # of each endpoint
        self._down: set[str] = set()
        self._endpoints = list(endpoints)
        self._group_size = group_size
        self._streams = streams
        self._prompts = task.train_prompts(seed)
        self._groups: queue.Queue[list[Rollout]] = queue.Queue()
        self._ahead = ahead
        self._seed = seed * 1_000_003
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def take(self, groups: int) -> list[list[Rollout]]:
        """Wait for so many groups of rollouts, each of one prompt.

        Raises:
            WavebusError: no engine gives any.
        """
        taken: list[list[Rollout]] = []
        waited_s = 0.0
        while len(taken) < groups:
            if self._error is not None:
                raise WavebusError(f"rollouts failed: {self._error}") from self._error
            try:
                taken.append(self._groups.get(timeout=1.0))
            except queue.Empty:
                waited_s += 1.0
                if waited_s > _PATIENCE_S:
                    raise WavebusError(f"no rollout for {waited_s:.0f} s") from None
                continue
            waited_s = 0.0
        return taken

    def greedy_reward(self) -> float:
        """Mean reward of the engines' greedy answers to the held-out prompts."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._greedy(), self._loop).result(_PATIENCE_S)

    def killing(self, endpoint: str) -> None:
        """The engine there is about to be killed, and will come back."""
        self._kills[endpoint] += 1
        self._down.add(endpoint)

    # -- in the thread ----------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - told to whoever takes
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        # A connection that the server closes at the moment of its reuse loses a request:
        # let go of idle ones before servers do (after 5 s, vLLM's).
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            self._ready.set()
            streams = [
                asyncio.create_task(self._stream(endpoint, measured=index == 0))
                for endpoint in self._endpoints
                for index in range(self._streams)
            ]
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait([stopped, *streams], return_when=asyncio.FIRST_COMPLETED)
            for stream in streams:
                stream.cancel()
            ends = await asyncio.gather(*streams, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    async def _stream(self, endpoint: str, *, measured: bool) -> None:
        while True:
            prompt = next(self._prompts)
            self._seed += 1
            group = await self._ask(
                endpoint, prompt, n=self._group_size, seed=self._seed, measured=measured
            )
            if group:
                self._groups.put(group)
            while self._groups.qsize() > self._ahead:
                self._groups.get_nowait()
                self.counts.left_out += 1

    async def _greedy(self) -> float:
        prompts = task.held_out()
        answers = await asyncio.gather(
            *(
                self._ask(self._endpoints[i % len(self._endpoints)], prompt, n=1, seed=None)
                for i, prompt in enumerate(prompts)
            )
        )
        return sum(group[0].reward for group in answers if group) / len(prompts)

    async def _ask(
        self,
        endpoint: str,
        prompt: tuple[int, ...],
        *,
        n: int,
        seed: int | None,
        measured: bool = False,
    ) -> list[Rollout]:
        """One request; its sequences, without those that were lost. ``seed=None``: greedy.
        ``measured``: the times between its tokens count."""
        sampling: dict[str, Any] = {
            "n": n,
            "temperature": 0.0 if seed is None else 1.0,
            "max_tokens": task.MAX_TOKENS,
            "stop_token_ids": [task.EOS],
            "logprobs": 0,
        }
        if seed is not None:
            sampling["seed"] = seed
        body = {"token_ids": list(prompt), "sampling_params": sampling, "stream": measured}
        self.counts.requests += 1
        kills, began_s = self._kills[endpoint], time.time()
        try:
            answer = await self._answer(endpoint, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            if self._kills[endpoint] > kills or endpoint in self._down:
                self.counts.cut_short["killed"] += 1
                await self._until_it_serves(endpoint)
            else:
                self._count_lost(f"{type(error).__name__}: {error}")
            return []
        rollouts = [self._rollout(prompt, choice) for choice in answer["choices"]]
        whole = [rollout for rollout in rollouts if rollout is not None]
        for rollout in whole:
            self._whole(rollout)
        if self._faults and any(each["finish_reason"] == "abort" for each in answer["choices"]):
            self.counts.aborted.append((endpoint, began_s, time.time()))
        elif len(whole) < n:
            reasons = Counter(choice["finish_reason"] for choice in answer["choices"])
            self._count_lost(f"{len(whole)} of {n} sequences whole; they ended by {dict(reasons)}")
        return whole

    async def _answer(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request's; what a paused engine rejects is sent again until it is resumed."""
        while True:
            async with self._session.post(endpoint + _ROUTE, json=body) as response:
                streamed = response.ok and body["stream"]
                answer = await (self._merged(response) if streamed else response.json())
                if response.ok and "error" not in answer:
                    return answer
            if not is_rejected(answer):
                raise WavebusError(f"{endpoint}: {response.status}: {answer}")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _merged(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        """Read a stream to its end; return the answer that a request without one gets.

        The status line is gone when an engine rejects the request: its error is an event.
        """
        choices: dict[int, dict[str, Any]] = {}
        last_s: dict[int, float] = {}
        async for line in response.content:
            if not line.startswith(_DATA) or line.startswith(_END):
                continue
            event: dict[str, Any] = json.loads(line[len(_DATA) :])
            if "choices" not in event:
                return event
            now_s = time.monotonic()
            for choice in event["choices"]:
                index, ids = choice["index"], choice["token_ids"] or []
                if ids:
                    gap_ms = (now_s - last_s.get(index, now_s)) * 1000
                    self.counts.longest_token_gap_ms = max(self.counts.longest_token_gap_ms, gap_ms)
                    last_s[index] = now_s
                whole = choices.setdefault(index, {"token_ids": [], "logprobs": {"content": []}})
                logprobs = choice.get("logprobs") or {"content": []}
                whole["token_ids"] += ids
                whole["logprobs"]["content"] += logprobs["content"]
                whole["finish_reason"] = choice["finish_reason"]
                whole["weight_versions"] = choice.get("weight_versions")
        return {"choices": [choices[index] for index in sorted(choices)]}

    async def _until_it_serves(self, endpoint: str) -> None:
        """An engine in the place of one that was killed."""
        while True:
            try:
                async with self._session.get(f"{endpoint}/health") as response:
                    if response.status < 400:  # noqa: PLR2004 - HTTP's border of errors
                        self._down.discard(endpoint)
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(_LOOK_AGAIN_S)

    def _count_lost(self, why: str) -> None:
        self.counts.lost += 1
        self.counts.why_lost[why] += 1

    def _rollout(self, prompt: tuple[int, ...], choice: dict[str, Any]) -> Rollout | None:
        ids = tuple(choice["token_ids"])
        whole = {"stop": len(ids) > 0, "length": len(ids) == task.MAX_TOKENS}
        if not whole.get(choice["finish_reason"], False):
            return None
        versions = tuple(_versions(choice.get("weight_versions") or (), len(ids)))
        self.counts.tokens_by_version.update(versions)
        logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        return Rollout(prompt, ids, logprobs, task.reward(prompt, ids), versions)


def _versions(spans: Sequence[dict[str, Any]], length: int) -> Iterator[int]:
    """Each token's version, from spans over token indexes; 0 where none is told."""
    versions = [0] * length
    for span in spans:
        label = span["version"]
        number = int(label) if str(label).isdigit() else 0
        versions[span["start"] : span["end"]] = [number] * (span["end"] - span["start"])
    return iter(versions[:length])
