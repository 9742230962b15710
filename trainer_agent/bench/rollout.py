"""Who asks in ``bench rollout``: a process that asks through the rollout client, or aiohttp alone.

``python -m trainer_agent.bench.rollout BROKER GROUP LOOP``, until stdin ends; with BROKER ``-``,
aiohttp alone. Each line is a :class:`Wave` in JSON; the answer says what the wave took.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

import aiohttp
import msgspec

import bus.log
from bus.event_stream import EventStream
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer
from trainer_agent.rollouts.attempt import DECODER, END, GENERATE
from trainer_agent.rollouts.client import RolloutClient

if TYPE_CHECKING:
    from bus.runtime.event_loop import LoopChoice

_PROMPT_TOKENS: Final = 32
_NEW_TOKENS: Final = 8
_IDS: Final = range(4, 16)  # every vocabulary has these
_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Wave:
    """Streams that begin together.

    Attributes:
        name: prompts and sessions differ between names.
        tokens: of each answer.
        turns: of each stream; a turn's prompt is the one before, its answer, and new tokens.
        urls: where aiohttp alone asks, in turn.
        timed: note when tokens come.
    """

    name: str
    streams: int
    tokens: int
    turns: int = 1
    urls: tuple[str, ...] = ()
    timed: bool = False


@dataclass
class Seen:
    """What a timed wave has seen.

    Attributes:
        first_s: of each stream, when its first token came.
        live, rss_mb: streams that had not ended when all had a token, and this process's memory.
        seams: which engine gave no more of an answer, and when another one gave the next token.
    """

    streams: int
    first_s: list[float] = field(default_factory=list)
    ended: int = 0
    live: int = 0
    rss_mb: float = 0.0
    seams: list[tuple[str, float]] = field(default_factory=list)
    _engines: dict[int, str] = field(default_factory=dict)

    def note(self, stream: int, engine: str) -> None:
        """A token has come."""
        before = self._engines.get(stream)
        if before == engine:
            return
        self._engines[stream] = engine
        if before is not None:
            self.seams.append((before, time.monotonic()))
            return
        self.first_s.append(time.monotonic())
        if len(self.first_s) == self.streams:
            self.live, self.rss_mb = self.streams - self.ended, _rss_mb()


class Ask(Protocol):
    """One request, by its wave, stream and prompt; its tokens."""

    async def __call__(
        self, wave: Wave, seen: Seen, stream: int, prompt: list[int], /
    ) -> list[int]: ...


def by_client(client: RolloutClient) -> Ask:
    """Through the rollout client."""

    async def ask(wave: Wave, seen: Seen, stream: int, prompt: list[int]) -> list[int]:
        done = await client.generate(
            prompt,
            _sampling(wave),
            session_id=f"{wave.name}-{stream}",
            on_delta=(lambda delta: seen.note(stream, delta.engine)) if wave.timed else None,
        )
        return list(done.choices[0].token_ids)

    return ask


def by_aiohttp(session: aiohttp.ClientSession) -> Ask:
    """With aiohttp alone: it parses as the client does, and believes what it is told."""

    async def ask(wave: Wave, seen: Seen, stream: int, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        logprobs: list[float] = []
        body = {"token_ids": prompt, "sampling_params": _sampling(wave), "stream": True}
        headers = {"Content-Type": "application/json", "X-Session-ID": f"{wave.name}-{stream}"}
        async with session.post(
            wave.urls[stream % len(wave.urls)] + GENERATE,
            data=msgspec.json.encode(body),
            headers=headers,
            raise_for_status=True,
        ) as response:
            events = EventStream()
            async for chunk in response.content.iter_any():
                for data in events.feed(chunk):
                    if data.startswith(END):
                        continue
                    for piece in DECODER.decode(data).choices or ():
                        tokens += piece.token_ids or ()
                        if piece.logprobs:
                            logprobs += [each.logprob for each in piece.logprobs.content]
                        if wave.timed:
                            seen.note(stream, "")
        return tokens

    return ask


async def run(wave: Wave, ask: Ask) -> dict[str, object]:
    """One wave, and what it took."""
    seen = Seen(wave.streams)

    async def one(stream: int) -> int:
        drawn = random.Random(f"{wave.name} {stream}")  # noqa: S311 - no secret
        prompt = drawn.choices(_IDS, k=_PROMPT_TOKENS)
        count = 0
        for _ in range(wave.turns):
            tokens = await ask(wave, seen, stream, prompt)
            count += len(tokens)
            prompt = [*prompt, *tokens, *drawn.choices(_IDS, k=_NEW_TOKENS)]
        seen.ended += 1
        return count

    begun_s, cpu_s = time.monotonic(), time.process_time()
    counts = await asyncio.gather(*(one(stream) for stream in range(wave.streams)))
    return {
        "tokens": sum(counts),
        "wall_s": time.monotonic() - begun_s,
        "cpu_s": time.process_time() - cpu_s,
        "ttft_ms": [(each - begun_s) * 1000 for each in seen.first_s],
        "live": seen.live,
        "rss_mb": seen.rss_mb,
        "seams": seen.seams,
    }


def _sampling(wave: Wave) -> dict[str, object]:
    return {"max_tokens": wave.tokens, "ignore_eos": True, "logprobs": 0}


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES / 1e6


async def main(broker: str, group: str) -> None:
    """Wave by wave, until stdin ends."""
    async with contextlib.AsyncExitStack() as stack:
        if broker == "-":
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            timeout = aiohttp.ClientTimeout(total=None)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout)
            ask = by_aiohttp(await stack.enter_async_context(session))
        else:
            ask = by_client(await stack.enter_async_context(RolloutClient(broker, group=group)))
        async for line in read_commands():
            write_answer(**await run(msgspec.json.decode(line, type=Wave), ask))


if __name__ == "__main__":
    address, name, kind = sys.argv[1:]
    bus.log.configure(level="warning", json=True)
    event_loop.run(main(address, name), loop=cast("LoopChoice", kind))
