"""The demo: asynchronous GRPO, with every optimizer step's weights sent over the bus."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from bus.errors import Refused
from bus.messages import NackCode
from trainer_agent.demo.learner import GrpoConfig, GrpoLearner
from trainer_agent.demo.oracle import Verdict, judge
from trainer_agent.demo.policy import Policy, PolicyConfig, copy_of, save_checkpoint
from trainer_agent.demo.processes import DpCoordinator, EngineKind, Processes
from trainer_agent.demo.rollouts import RolloutPool
from trainer_agent.sync_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bus.messages import EngineView
    from trainer_agent.demo.learner import Rollout
    from trainer_agent.options import How
    from trainer_agent.report import UpdateReport

# As slow as a large model; the tiny one would answer faster than the client can read.
_PACE: Final = ("--step-ms", "10")
GROUP: Final = "policy"
EVAL_EVERY_STEPS: Final = 25
EXPERTS: Final = 4
BOOT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a run.

    The run ends when ``steps``, ``updates``, ``seconds`` or ``enough`` is reached.

    Attributes:
        engine: ``embedded``, or ``vllm`` for vLLM servers on the CPU.
        engines: how many engines there are.
        dp_size: how many ranks each engine has. If more than 1, each is a DP group, and the policy
            is a mixture of experts.
        dp_coordinator: which coordinator starts the waves of vLLM's ranks.
        steps: the most optimizer steps.
        updates: the most weight updates; None: no limit.
        seconds: the longest duration of the training.
        enough: the held-out reward at which the run ends.
        seed: decides the policy's first weights, the tasks and the sampling.
        how: how updates are made: ``staged``, ``paused``, or ``auto``.
        withhold_weights: True trains without sending weights, so that engines can't learn.
    """

    engine: EngineKind = "embedded"
    engines: int = 2
    dp_size: int = 1
    dp_coordinator: DpCoordinator = "vllm"
    steps: int = 480
    updates: int | None = None
    seconds: float = 150.0
    enough: float = 0.93
    seed: int = 0
    how: How = "auto"
    withhold_weights: bool = False


@dataclass(slots=True)
class DemoResult:
    """The results of a run. Rewards are means over greedy answers to held-out prompts.

    Attributes:
        options: the run's options.
        reward_first: the reward before training.
        reward_last: the last reward.
        seconds: how long the run took.
        requests: how many requests were made.
        requests_lost: how many requests failed.
        steps: how many optimizer steps were made.
        reports: the report of each update.
        update_steps: the optimizer step of each update.
        train_rewards: the mean reward of the sampled rollouts, for each step.
        greedy: pairs of a step and the reward after it.
        tokens_by_version: how many tokens were sampled with each version.
        longest_token_gap_ms: the longest time between two tokens of one sequence, on arrival.
        verdict: the result of the check of all tokens.
    """

    options: DemoOptions
    reward_first: float = 0.0
    reward_last: float = 0.0
    seconds: float = 0.0
    requests: int = 0
    requests_lost: int = 0
    steps: int = 0
    reports: list[UpdateReport] = field(default_factory=list)
    update_steps: list[float] = field(default_factory=list)  # step of each update
    train_rewards: list[float] = field(default_factory=list)  # per step
    greedy: list[tuple[float, float]] = field(default_factory=list)  # (step, reward)
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    longest_token_gap_ms: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def staged(self) -> int:
        """The number of staged updates."""
        return sum(report.how == "staged" for report in self.reports)

    @property
    def endpoints(self) -> int:
        """The number of engines on the bus; every rank of a DP group is one."""
        return self.options.engines * self.options.dp_size

    @property
    def interrupted(self) -> int:
        """The number of updates whose swap or pause had requests in flight."""
        return sum(report.interrupted > 0 for report in self.reports)

    def pause_ms(self, quantile: float) -> float:
        """Returns a quantile of the time from the first PAUSE_LOCAL to the last engine resumed."""
        times = sorted(report.paused_ms for report in self.reports)
        return times[math.ceil(quantile * len(times)) - 1] if times else 0.0

    @property
    def swap_ms(self) -> float:
        """The median time from COMMIT to the last acknowledgement of staged updates; 0 if none."""
        times = [report.commit_ms for report in self.reports if report.how == "staged"]
        return statistics.median(times) if times else 0.0

    def as_json(self) -> dict[str, object]:
        """Returns the object that ``--json`` prints."""
        return {
            "engine": self.options.engine,
            "engines": self.endpoints,
            "dp_size": self.options.dp_size,
            "reward_first": round(self.reward_first, 4),
            "reward_last": round(self.reward_last, 4),
            "steps": self.steps,
            "updates": len(self.reports),
            "staged": self.staged,
            "interrupted": self.interrupted,
            "pause_ms_p50": round(self.pause_ms(0.50), 2),
            "pause_ms_p99": round(self.pause_ms(0.99), 2),
            "swap_ms": round(self.swap_ms, 2),
            "longest_token_gap_ms": round(self.longest_token_gap_ms, 1),
            "requests": self.requests,
            "requests_lost": self.requests_lost,
            "versions": len(self.tokens_by_version),
            "tokens_checked": self.verdict.tokens,
            "mixed_tokens": self.verdict.mixed,
            "logprob_error_max": self.verdict.worst,
            "seconds": round(self.seconds, 1),
        }


def run_demo(
    options: DemoOptions,
    *,
    say: Callable[[str], None],
    progress: Callable[[DemoResult, int], None],
) -> DemoResult:
    """Runs the demo, and returns its results.

    Args:
        options: the options of the run.
        say: called with a line of text for each event.
        progress: called with the results so far and the version.

    Raises:
        WavebusError: a process ended, or the bus refused a request.
    """
    started = time.monotonic()
    torch.set_num_threads(1)
    config = GrpoConfig()
    shape = PolicyConfig(experts=EXPERTS) if options.dp_size > 1 else PolicyConfig()
    policy = Policy(shape, seed=options.seed)
    learner = GrpoLearner(policy, config)
    result = DemoResult(options)
    with tempfile.TemporaryDirectory(prefix="wavebus-demo-") as name:
        folder = Path(name)
        save_checkpoint(policy, folder / "checkpoint")
        with Processes(folder) as processes:
            address = processes.broker()
            say(f"broker at {address}; logs in {folder}")
            names = [f"engine-{i}" for i in range(options.engines)]
            for each in names:
                processes.sidecar(
                    each,
                    options.engine,
                    address,
                    folder / "checkpoint",
                    dp_size=options.dp_size,
                    dp_coordinator=options.dp_coordinator,
                    options=_PACE if options.engine == "embedded" else (),
                )
            with SyncTrainerAgent(address, group=GROUP, name="trainer") as agent:
                engines = _wait(agent, processes, result.endpoints)
                say(", ".join(f"{e.name}: {e.software} at {e.endpoint}" for e in engines))
                rollouts: list[Rollout] = []
                pool = RolloutPool(
                    address,
                    group=GROUP,
                    group_size=config.group_size,
                    streams=4 * len(engines),
                    ahead=2 * config.groups,
                    seed=options.seed,
                    whole=rollouts.append,
                )
                weights = {0: copy_of(policy)}
                with pool:
                    _train(agent, learner, pool, processes, result, progress, started, weights)
                    result.requests_lost = pool.counts.lost
                    for why, times in pool.counts.why_lost.most_common(5):
                        say(f"lost {times} × {why}")
                    result.requests = pool.counts.requests
                    result.longest_token_gap_ms = pool.counts.longest_token_gap_ms
                    result.tokens_by_version = dict(sorted(pool.counts.tokens_by_version.items()))
            processes.check()
    result.verdict = judge(shape, weights, rollouts)
    result.seconds = time.monotonic() - started
    return result


class _Enough(Exception):
    """Raised to end the run when all requested updates are made."""


def _wait(agent: SyncTrainerAgent, processes: Processes, count: int) -> list[EngineView]:
    """Waits for the engines; raises ``WavebusError`` if a process ends meanwhile."""
    deadline = time.monotonic() + BOOT_S
    while True:
        processes.check()
        try:
            return agent.wait_for_engines(count, timeout_s=2.0)
        except Refused as refused:
            if refused.code is not NackCode.TIMEOUT or time.monotonic() > deadline:
                raise


def _train(
    agent: SyncTrainerAgent,
    learner: GrpoLearner,
    pool: RolloutPool,
    processes: Processes,
    result: DemoResult,
    progress: Callable[[DemoResult, int], None],
    started: float,
    weights: dict[int, dict[str, Tensor]],
) -> None:
    options = result.options
    version = 0

    def publish() -> None:
        """Sends the new weights to the engines."""
        nonlocal version
        if options.withhold_weights:
            return
        version = agent.update_weights(
            learner.policy, label=f"step {learner.steps}", how=options.how
        )
        weights[version] = copy_of(learner.policy)
        report = agent.last_update
        assert report is not None
        result.reports.append(report)
        result.update_steps.append(learner.steps)
        if options.updates is not None and len(result.reports) >= options.updates:
            raise _Enough

    result.reward_first = result.reward_last = pool.greedy_reward()
    result.greedy.append((0, result.reward_first))
    progress(result, version)
    while learner.steps < options.steps and time.monotonic() - started < options.seconds:
        try:
            stats = learner.step(pool.take(learner.cfg.groups), publish)
        except _Enough:
            break
        processes.check()
        result.steps = learner.steps
        result.requests_lost = pool.counts.lost
        result.train_rewards.append(stats.reward)
        if learner.steps % EVAL_EVERY_STEPS == 0:
            result.reward_last = pool.greedy_reward()
            result.greedy.append((learner.steps, result.reward_last))
        progress(result, version)
        if result.reward_last >= options.enough:
            break
    result.reward_last = pool.greedy_reward()
    result.greedy.append((learner.steps, result.reward_last))
    progress(result, version)
