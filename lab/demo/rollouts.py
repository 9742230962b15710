"""Generates rollouts all the time, with several requests in flight, in a background thread.

This module does not handle updates, pauses or dead engines, because the rollout client continues
interrupted requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from bus.errors import NoEngine, RequestPoisoned, RolloutFailed, WavebusError
from lab.demo import task
from lab.demo.learner import GrpoConfig, Rollout
from lab.demo.processes import GROUP
from trainer_agent._bus_thread import event_loop_thread
from trainer_agent._rollouts.client import RolloutClient

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from trainer_agent._rollouts.results import Choice, TokenDelta

_PATIENCE_S: Final = 120.0
# Why an attempt ended early, as the demo's report has it.
_CUT_SHORT: Final = {
    "died": "killed",
    "unreachable": "killed",
    "abort": "out_of_service",
    "rejected": "out_of_service",
}


@dataclass(slots=True)
class Counts:
    """Counts requests, how they ended, and their tokens.

    Attributes:
        cut_short: how often an engine interrupted a request, which was then continued, by reason.
        aborted: for each engine that ended a request early: its name, and the request's begin and
            end on the wall clock, in seconds.
        tokens_by_version: how many tokens were sampled with each version of the weights.
        longest_token_gap_ms: the longest time between two tokens of one sequence, on arrival.
    """

    requests: int = 0
    lost: int = 0
    why_lost: Counter[str] = field(default_factory=Counter)
    cut_short: Counter[str] = field(default_factory=Counter)
    aborted: list[tuple[str, float, float]] = field(default_factory=list)
    tokens_by_version: Counter[int] = field(default_factory=Counter)
    longest_token_gap_ms: float = 0.0


class RolloutPool:
    """Keeps requests in flight, and queues finished groups of answers for the trainer.

    Use the pool as a context manager, from one thread.

    Args:
        broker: the broker's address.
        config: how many groups a step takes, and how many answers of one prompt are a group. Twice
            as many groups may wait for the trainer; the oldest ones beyond that are dropped.
        streams: the number of requests in flight.
        seed: the seed of prompts and answers.

    Attributes:
        counts: the requests so far, and how they ended.
        rollouts: every finished sequence.
    """

    def __init__(self, broker: str, config: GrpoConfig, streams: int, seed: int) -> None:
        self.counts = Counts()
        self.rollouts: list[Rollout] = []
        self._broker = broker
        self._config = config
        self._streams = streams
        self._prompts = task.train_prompts(seed)
        self._groups: queue.Queue[list[Rollout]] = queue.Queue()
        self._seed = seed * 1_000_003
        self._thread = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(event_loop_thread())
            self._serving, _ = self._portal.start_task(self._serve)
            stack.callback(self._serving.cancel)
            self._thread = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    def take(self, groups: int) -> list[list[Rollout]]:
        """Waits for ``groups`` groups of rollouts, each of one prompt, and returns them.

        Raises:
            WavebusError: no group was finished for 120 s.
        """
        taken: list[list[Rollout]] = []
        waited_s = 0.0
        while len(taken) < groups:
            self._check()
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
        """Returns the mean reward of the engines' greedy answers to the held-out prompts."""
        self._check()
        return self._portal.start_task_soon(self._greedy).result(_PATIENCE_S)

    def _check(self) -> None:
        """Raises ``WavebusError`` if a stream of requests has failed."""
        if self._serving.done():
            error = self._serving.exception()
            if isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise WavebusError(f"rollouts failed: {error}") from error

    # -- in the thread ----------------------------------------------------------

    async def _serve(self, *, task_status: TaskStatus[None]) -> None:
        async with (
            RolloutClient(self._broker, group=GROUP) as self._client,
            anyio.create_task_group() as streams,
        ):
            for _ in range(self._streams):
                streams.start_soon(self._stream)
            task_status.started()

    async def _stream(self) -> None:
        while True:
            self._seed += 1
            group = await self._ask(next(self._prompts), n=self._config.group_size, seed=self._seed)
            if group:
                self._groups.put(group)
            while self._groups.qsize() > 2 * self._config.groups:
                self._groups.get_nowait()

    async def _greedy(self) -> float:
        prompts = task.held_out()
        answers = await asyncio.gather(*(self._ask(prompt, n=1, seed=None) for prompt in prompts))
        return sum(group[0].reward for group in answers if group) / len(prompts)

    async def _ask(self, prompt: tuple[int, ...], *, n: int, seed: int | None) -> list[Rollout]:
        """Sends a request; returns its sequences, or none if it fails. No seed: greedy."""
        sampling: dict[str, Any] = {
            "n": n,
            "temperature": 0.0 if seed is None else 1.0,
            "max_tokens": task.MAX_TOKENS,
            "stop_token_ids": [task.EOS],
            "logprobs": 0,
        }
        if seed is not None:
            sampling["seed"] = seed
        self.counts.requests += 1
        began_s = time.time()
        last_s: dict[int, float] = {}

        def note_gap(delta: TokenDelta) -> None:
            now_s = time.monotonic()
            gap_ms = (now_s - last_s.get(delta.index, now_s)) * 1000
            self.counts.longest_token_gap_ms = max(self.counts.longest_token_gap_ms, gap_ms)
            last_s[delta.index] = now_s

        try:
            done = await self._client.generate(
                prompt, sampling, on_inexact="continue", on_delta=note_gap
            )
        except (NoEngine, RequestPoisoned, RolloutFailed) as error:
            self.counts.lost += 1
            self.counts.why_lost[f"{type(error).__name__}: {error}"] += 1
            return []
        cut = {(a.engine, a.ended_by) for choice in done.choices for a in choice.attempts[:-1]}
        self.counts.cut_short.update({_CUT_SHORT.get(how, how) for _, how in cut})
        ended_s = time.time()
        aborted = (engine for engine, how in cut if how == "abort")
        self.counts.aborted += [(engine, began_s, ended_s) for engine in aborted]
        return [self._rollout(prompt, choice) for choice in done.choices]

    def _rollout(self, prompt: tuple[int, ...], choice: Choice) -> Rollout:
        # A token whose version is unknown has version 0.
        versions = tuple(s.version or 0 for s in choice.spans for _ in range(s.start, s.end))
        self.counts.tokens_by_version.update(versions)
        assert choice.logprobs is not None
        reward = task.reward(prompt, choice.token_ids)
        rollout = Rollout(prompt, choice.token_ids, choice.logprobs, reward, versions)
        self.rollouts.append(rollout)
        return rollout
