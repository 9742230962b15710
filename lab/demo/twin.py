"""Proves that engines answer the same while they are updated and killed as when undisturbed.

Sampled sessions first run on undisturbed engines. Their answers are the twins. Then the sessions
are repeated while the same weights are sent as new versions, and one engine after the other is
killed by SIGKILL and restarted. Each answer is compared with its twin, token for token.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from bus.errors import WavebusError
from lab.demo import task
from lab.demo.policy import make_policy, save_checkpoint
from lab.demo.processes import BROKER_TIMES, GROUP, Processes
from lab.network import PolicyConfig
from trainer_agent._agent import TrainerAgent
from trainer_agent._rollouts.client import RolloutClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.demo.plan import DemoPlan
    from trainer_agent._rollouts.results import Choice

_TURNS: Final = 3
_NEW_TOKENS: Final = 5  # of the prompt, in each turn
_ANSWER_TOKENS: Final = 48
_BOOT_S: Final = 120.0
_LOOK_AGAIN_S: Final = 0.2
# The time from the end of an update to the next update.
_UPDATE_EVERY_S: Final = 2.0
# The least duration of an engine's step, so that requests last long enough to be interrupted.
_PACE: Final = ("--step-ms", "40.0")
# Each token then depends on the tokens before it, not only on its own random draw.
_HEAD_STD: Final = 0.3


@dataclass(slots=True)
class TwinResult:
    """The results of a run; ``--json`` prints them under the same names."""

    plan: DemoPlan
    answers: int = 0  # that were compared with their twins
    tokens: int = 0  # of these answers
    twin_differs: int = 0  # answers
    unknown_spans: int = 0  # of tokens whose version is not known
    lost: int = 0  # sessions
    why_lost: Counter[str] = field(default_factory=Counter)
    kills: int = 0  # of engines
    updates: int = 0  # that were committed
    staged: int = 0  # of these updates
    updates_failed: int = 0
    continued: int = 0  # answers that took more than one attempt
    cut_by: Counter[str] = field(default_factory=Counter)  # why attempts ended early
    versions: int = 0  # of the tokens
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether all answers came, equal those of the quiet run, and have known versions."""
        return bool(self.answers) and not (self.twin_differs or self.unknown_spans or self.lost)

    def as_json(self) -> dict[str, object]:
        """Returns the object that ``demo --sessions --json`` prints."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found |= {"why_lost": dict(self.why_lost), "cut_by": dict(self.cut_by)}
        plan: DemoPlan = found.pop("plan")
        return {"sessions": plan.sessions, "engines": plan.engine_count, **found}


class Twin:
    """Runs sessions twice, undisturbed and disturbed, and compares the answers.

    Args:
        plan: the run's options.
        say: called with a line of text for each event.
    """

    def __init__(self, plan: DemoPlan, say: Callable[[str], None]) -> None:
        self.result = TwinResult(plan)
        self._plan = plan
        self._say = say
        self._policy = make_policy(PolicyConfig(head_std=_HEAD_STD), seed=plan.seed)
        self._engines = [f"engine-{index}" for index in range(plan.engine_count)]
        self._versions: set[int | None] = set()

    def run(self) -> TwinResult:
        """Runs the undisturbed sessions, then the disturbed ones.

        Raises:
            WavebusError: the bus did not start, or an undisturbed session failed.
        """
        started_s = time.monotonic()
        torch.set_num_threads(1)
        with (
            tempfile.TemporaryDirectory(prefix="wavebus-demo-") as folder,
            Processes(Path(folder)) as self._processes,
        ):
            asyncio.run(self._run())
        self.result.seconds = round(time.monotonic() - started_s, 1)
        return self.result

    async def _run(self) -> None:
        checkpoint = self._processes.folder / "checkpoint"
        save_checkpoint(self._policy, checkpoint)
        broker = self._processes.broker(*BROKER_TIMES)
        for name in self._engines:
            self._processes.sidecar(name, "embedded", broker, checkpoint, options=_PACE)
        async with (
            TrainerAgent(broker, group=GROUP, name="trainer", keep_last=True) as agent,
            RolloutClient(broker, group=GROUP) as self._client,
        ):
            await agent.wait_for_engines(len(self._engines), timeout_s=_BOOT_S)
            numbers = range(self._plan.sessions or 0)
            self._say(f"{len(numbers)} sessions on {len(self._engines)} quiet engines")
            quiet = await asyncio.gather(*(self._talk(number) for number in numbers))
            until_s = time.monotonic() + self._plan.limit_s
            async with asyncio.TaskGroup() as others:
                disturbing = [
                    others.create_task(self._update(agent)),
                    others.create_task(self._kill(agent)),
                ]
                async with asyncio.TaskGroup() as sessions:
                    for number, twin in enumerate(quiet):
                        sessions.create_task(self._repeat(number, twin, until_s))
                for each in disturbing:
                    each.cancel()
        self.result.versions = len(self._versions)

    # -- sessions ---------------------------------------------------------------

    async def _talk(self, number: int) -> list[Choice]:
        """Runs one session, and returns the choices of all turns.

        A turn's prompt is the previous prompt, its first answer, and new tokens.
        """
        drawn = random.Random(f"{self._plan.seed} {number}")  # noqa: S311 - no secret
        prompt: list[int] = [task.BOS]
        choices: list[Choice] = []
        for _ in range(_TURNS):
            prompt += drawn.choices(range(task.FIRST_LETTER, task.VOCAB_SIZE), k=_NEW_TOKENS)
            sampling = {
                "n": 2,
                "seed": drawn.getrandbits(32),
                "max_tokens": _ANSWER_TOKENS,
                "ignore_eos": True,
            }
            done = await self._client.generate(prompt, sampling, session_id=f"session-{number}")
            prompt += done.choices[0].token_ids
            choices += done.choices
        self._client.finish_session(f"session-{number}")
        return choices

    async def _repeat(self, number: int, twin: list[Choice], until_s: float) -> None:
        """Repeats a session, and compares each answer with its twin."""
        result = self.result
        while time.monotonic() < until_s:
            try:
                talk = await self._talk(number)
            except WavebusError as error:
                result.lost += 1
                result.why_lost[f"{type(error).__name__}: {error}"] += 1
                continue
            for choice, other in zip(talk, twin, strict=True):
                result.answers += 1
                result.tokens += len(choice.token_ids)
                result.twin_differs += choice.token_ids != other.token_ids
                result.unknown_spans += sum(span.version is None for span in choice.spans)
                result.continued += len(choice.attempts) > 1
                result.cut_by.update(each.ended_by for each in choice.attempts[:-1])
                self._versions.update(span.version for span in choice.spans)

    # -- what disturbs them -----------------------------------------------------

    async def _update(self, agent: TrainerAgent) -> None:
        """Sends the same weights as new versions, until cancelled."""
        while True:
            await asyncio.sleep(_UPDATE_EVERY_S)
            try:
                await agent.update_weights(self._policy)
            except WavebusError as error:
                self.result.updates_failed += 1
                self._say(f"an update failed: {type(error).__name__}: {error}")
                continue
            self.result.updates += 1
            self.result.staged += (
                agent.last_update is not None and agent.last_update.how == "staged"
            )

    async def _kill(self, agent: TrainerAgent) -> None:
        """Kills one engine after the other, each when all of them serve, until cancelled."""
        for name in cycle(self._engines):
            await asyncio.sleep(self._plan.kill_every)
            while len((await agent.status()).groups[0].routable) < len(self._engines):
                self._processes.check()
                await asyncio.sleep(_LOOK_AGAIN_S)
            self._say(f"SIGKILL {name}")
            self._processes.restart(name)
            self.result.kills += 1
