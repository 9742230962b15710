"""A client of one engine: one long greedy answer after the other, streamed over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from bus.rejection import is_closed, is_rejected
from sidecar._vllm.core_state import parse_version
from tests.support.oracle import Span

if TYPE_CHECKING:
    from tests.faults.world import World

TOKENS: Final = 300
_VOCABULARY: Final = 128
_AGAIN_S: Final = 0.05


@dataclass
class Asked:
    """One request and its answer so far. ``spans`` come with the end."""

    engine: str
    prompt: tuple[int, ...]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str = ""
    error: str = ""

    @property
    def whole(self) -> bool:
        return self.finish == "length" and len(self.tokens) == self.wanted


@dataclass
class Watched:
    """What a client has got since ``begun_s``: tokens, requests that were begun then or later and
    ended whole, those that the engine ended before their time, and the longest time without a
    token. ``looks``: when somebody was missed, after how long, and the tokens by then."""

    begun_s: float = field(default_factory=time.monotonic)
    tokens: int = 0
    whole: int = 0
    aborted: int = 0
    looks: list[tuple[float, int]] = field(default_factory=list)
    _longest_s: float = 0.0
    _last_s: float = field(default_factory=time.monotonic)

    def got(self, tokens: int) -> None:
        self._longest_s, self._last_s = self.longest_s, time.monotonic()
        self.tokens += tokens

    def look(self) -> None:
        self.looks.append((time.monotonic() - self.begun_s, self.tokens))

    @property
    def longest_s(self) -> float:
        """That up to now, too."""
        return max(self._longest_s, time.monotonic() - self._last_s)


class Client:
    """Asks one thing after the other from :meth:`work` to :meth:`rest`, until it is closed.
    ``over`` are the requests that have ended.

    Args:
        name: of several that ask one engine, each has its own, and prompts of its own.
    """

    def __init__(self, engine: str, world: World, *, name: str = "") -> None:
        self.engine = engine
        self.over: list[Asked] = []
        self.now: Asked | None = None
        self.tokens = 0  # that have come, of all requests
        self.watched = Watched()
        self._world = world
        self._random = random.Random(name or engine)
        self._go_on = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def rest(self) -> None:
        """Let the request under way end, and ask for nothing more until :meth:`work`."""
        self._go_on.clear()
        await self._world.until(f"{self.engine} to answer", lambda: self.now is None)

    def work(self) -> None:
        self._go_on.set()

    def watch(self) -> None:
        """Watch it from now on."""
        self.watched = Watched()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._go_on.wait()
            seen = self._world.engines[self.engine]
            prompt = tuple(self._random.randrange(_VOCABULARY) for _ in range(6))
            self.now = asked = Asked(self.engine, prompt, TOKENS)
            watched = self.watched
            try:
                while not await self._ask(seen.endpoint, asked):  # noqa: ASYNC110
                    await asyncio.sleep(_AGAIN_S)
            except (aiohttp.ClientError, OSError) as error:
                asked.error = f"{type(error).__name__}: {error}"
            self.now = None
            watched.whole += asked.whole
            if asked.tokens or not asked.error:
                self.over.append(asked)
            self._world.news()
            if asked.error:  # there is nobody: until somebody joins in its place
                boot = seen.boot
                while self._world.engines[self.engine].boot == boot:
                    await self._world.something()
            elif not asked.tokens:  # not admitted; a later one may be
                await self._world.something()

    async def _ask(self, endpoint: str, asked: Asked) -> bool:
        """False: the engine is paused, and rejects it until it is resumed."""
        sampling = {"temperature": 0.0, "max_tokens": asked.wanted, "ignore_eos": True}
        body = {"token_ids": asked.prompt, "sampling_params": sampling, "stream": True}
        url = f"{endpoint}/inference/v1/generate"
        async with self._world.session.post(url, json=body, raise_for_status=True) as response:
            async for raw in response.content:
                if raw.startswith(b"data: {"):
                    said = json.loads(raw.removeprefix(b"data: "))
                    if is_closed(said):  # it has ended, with no tokens
                        asked.finish = "abort"
                        self.watched.aborted += 1
                    elif is_rejected(said):
                        return False
                    else:
                        self._chunk(asked, said)
        return True

    def _chunk(self, asked: Asked, said: dict[str, Any]) -> None:
        if "error" in said:
            asked.error = str(said["error"])
            return
        (choice,) = said["choices"]
        asked.tokens += choice["token_ids"]
        self.tokens += len(choice["token_ids"])
        if choice["token_ids"]:
            self.watched.got(len(choice["token_ids"]))
        if choice["finish_reason"]:
            asked.finish = choice["finish_reason"]
            self.watched.aborted += asked.finish == "abort"
            asked.spans = [
                Span(parse_version(span["version"]), span["start"], span["end"])
                for span in choice["weight_versions"]
            ]
        self._world.news()
