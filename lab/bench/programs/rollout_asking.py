"""The program that sends the requests of ``bench rollout``."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

import bus.log
from bus._event_stream import END, EventStream
from trainer_agent._rollouts.attempt import DECODER, GENERATE
from trainer_agent._rollouts.client import RolloutClient

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

_PROMPT_TOKENS: Final = 32
_NEW_TOKENS: Final = 8
_IDS: Final = range(4, 16)  # every vocabulary has these
_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")


class Wave(msgspec.Struct):
    """Requests that several streams send; all streams begin together.

    A stream sends its requests one after the other, as one session.

    Attributes:
        name: the wave's name, which makes its prompts and sessions unique.
        streams: how many streams there are.
        tokens: how many tokens each answer has.
        turns: how many requests each stream sends. Each prompt is the one before, its answer, and
            new tokens.
        urls: engines that aiohttp alone uses, in turn.
        timed: whether to record when tokens come.
        until_live: True ends the wave when every stream has a token; False when all are done.
        first_s: when the first token of each stream came, on ``time.monotonic()``'s clock.
        seams: for each answer that was interrupted by an engine's end: that engine, and when the
            next token came from another one.
        engines: by stream, the engine that sent the last token.
    """

    name: str
    streams: int
    tokens: int
    turns: int = 1
    urls: tuple[str, ...] = ()
    timed: bool = False
    until_live: bool = False
    first_s: list[float] = []
    seams: list[tuple[str, float]] = []
    engines: dict[int, str] = {}

    def note(self, stream: int, engine: str) -> None:
        """Records that an engine has sent a token of a stream now."""
        before = self.engines.get(stream)
        if before is None:
            self.first_s.append(time.monotonic())
        elif before != engine:
            self.seams.append((before, time.monotonic()))
        self.engines[stream] = engine


class RolloutAsking:
    """Sends waves of requests, with the rollout client or with aiohttp alone."""

    def __init__(self, asks: RolloutClient | aiohttp.ClientSession) -> None:
        self._asks = asks

    async def run(self, wave: dict[str, Any]) -> dict[str, object]:
        """Sends a wave of requests, with the fields in ``wave``; returns its times.

        Returns:
            ``tokens``: how many came; ``wall_s`` and ``cpu_s``: the time and this process's CPU
                time; ``ttft_ms``: each stream's time to its first token; ``live`` and ``rss_mb``:
                how many streams were open, and this process's memory at that moment; ``seams``: as
                in :class:`Wave`.
        """
        this = msgspec.convert(wave, Wave)
        begun_s, cpu_s = time.monotonic(), time.process_time()
        streams = [asyncio.create_task(self._stream(this, each)) for each in range(this.streams)]
        while this.until_live and len(this.first_s) < this.streams:
            done, _ = await asyncio.wait(streams, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()  # raises what ended it
        live, rss_mb = sum(not each.done() for each in streams), _rss_mb()
        for each in streams if this.until_live else ():
            each.cancel()
        counts = await asyncio.gather(*streams, return_exceptions=this.until_live)
        if isinstance(self._asks, RolloutClient):
            for stream in range(this.streams):
                self._asks.finish_session(f"{this.name}-{stream}")
        return {
            "tokens": sum(each for each in counts if isinstance(each, int)),
            "wall_s": time.monotonic() - begun_s,
            "cpu_s": time.process_time() - cpu_s,
            "ttft_ms": [(each - begun_s) * 1000 for each in this.first_s],
            "live": live,
            "rss_mb": rss_mb,
            "seams": this.seams,
        }

    async def _stream(self, wave: Wave, stream: int) -> int:
        """Sends the requests of one stream, and returns how many tokens came."""
        drawn = random.Random(f"{wave.name} {stream}")  # noqa: S311 - no secret
        prompt = drawn.choices(_IDS, k=_PROMPT_TOKENS)
        count = 0
        for _ in range(wave.turns):
            tokens = await self._ask(wave, stream, prompt)
            count += len(tokens)
            prompt = [*prompt, *tokens, *drawn.choices(_IDS, k=_NEW_TOKENS)]
        return count

    async def _ask(self, wave: Wave, stream: int, prompt: list[int]) -> list[int]:
        """Sends one request, and returns the tokens of its answer.

        aiohttp alone parses the answer as the rollout client does, but does not check it.
        """
        sampling: dict[str, Any] = {"max_tokens": wave.tokens, "ignore_eos": True, "logprobs": 0}
        session = f"{wave.name}-{stream}"
        if isinstance(self._asks, RolloutClient):
            on_delta = (lambda delta: wave.note(stream, delta.engine)) if wave.timed else None
            done = await self._asks.generate(
                prompt, sampling, session_id=session, on_delta=on_delta
            )
            return list(done.choices[0].token_ids)
        tokens: list[int] = []
        logprobs: list[float] = []
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
        async with self._asks.post(
            wave.urls[stream % len(wave.urls)] + GENERATE,
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json", "X-Session-ID": session},
            raise_for_status=True,
        ) as response:
            events = EventStream()
            async for chunk in response.content.iter_any():
                for data in events.feed(chunk):
                    for piece in () if data.startswith(END) else DECODER.decode(data).choices or ():
                        tokens += piece.token_ids or ()
                        if piece.logprobs:
                            logprobs += [each.logprob for each in piece.logprobs.content]
                        if wave.timed:
                            wave.note(stream, "")
        return tokens


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES / 1e6


async def rollout_asking(stack: AsyncExitStack, broker: str, group: str) -> RolloutAsking:
    """Makes a sender of requests: the rollout client or, without a broker, aiohttp alone."""
    bus.log.configure(level="warning", json=True)
    if broker:
        return RolloutAsking(await stack.enter_async_context(RolloutClient(broker, group=group)))
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    return RolloutAsking(await stack.enter_async_context(session))
