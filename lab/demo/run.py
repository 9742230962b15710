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
from lab.demo.learner import GrpoConfig, GrpoLearner
from lab.demo.oracle import Verdict, judge
from lab.demo.policy import copy_of, make_policy, save_checkpoint
from lab.demo.processes import GROUP, Processes
from lab.demo.rollouts import Counts, RolloutPool
from lab.network import PolicyConfig
from trainer_agent._sync_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from bus.messages import EngineView
    from lab.demo.plan import DemoPlan
    from trainer_agent._report import UpdateReport

# The most optimizer steps of a run, and the held-out reward at which it ends.
STEPS: Final = 480
_ENOUGH: Final = 0.93
_EVAL_EVERY_STEPS: Final = 25
_EXPERTS: Final = 4
_BOOT_S: Final = 600.0
# As slow as a large model; the tiny one would answer faster than the client can read.
_PACE: Final = ("--step-ms", "10")


@dataclass(slots=True)
class DemoResult:
    """The results of a run. Rewards are means over greedy answers to held-out prompts.

    Attributes:
        plan: the run's options.
        counts: the requests and their tokens.
        reports: the report of each update, by the optimizer step before it.
        train_rewards: the mean reward of the sampled rollouts, for each optimizer step.
        greedy: pairs of a number of optimizer steps and the reward after them.
        verdict: the result of the check of all tokens.
        seconds: how long the run took.
    """

    plan: DemoPlan
    counts: Counts = field(default_factory=Counts)
    reports: dict[int, UpdateReport] = field(default_factory=dict)
    train_rewards: list[float] = field(default_factory=list)
    greedy: list[tuple[int, float]] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    seconds: float = 0.0

    @property
    def reward_first(self) -> float:
        """The reward before training."""
        return self.greedy[0][1] if self.greedy else 0.0

    @property
    def reward_last(self) -> float:
        """The last reward."""
        return self.greedy[-1][1] if self.greedy else 0.0

    @property
    def staged(self) -> int:
        """The number of staged updates."""
        return sum(report.how == "staged" for report in self.reports.values())

    @property
    def endpoints(self) -> int:
        """The number of engines on the bus; every rank of a DP group is one."""
        return self.plan.engine_count * self.plan.dp_size

    @property
    def interrupted(self) -> int:
        """The number of updates whose swap or pause had requests in flight."""
        return sum(report.interrupted > 0 for report in self.reports.values())

    def pause_ms(self, quantile: float) -> float:
        """Returns a quantile of the time from the first PAUSE_LOCAL to the last engine resumed."""
        times = sorted(report.paused_ms for report in self.reports.values())
        return times[math.ceil(quantile * len(times)) - 1] if times else 0.0

    @property
    def swap_ms(self) -> float:
        """The median time from COMMIT to the last acknowledgement of staged updates; 0 if none."""
        times = [each.commit_ms for each in self.reports.values() if each.how == "staged"]
        return statistics.median(times) if times else 0.0

    def as_json(self) -> dict[str, object]:
        """Returns the object that ``--json`` prints."""
        return {
            "engine": self.plan.engine,
            "engines": self.endpoints,
            "dp_size": self.plan.dp_size,
            "reward_first": round(self.reward_first, 4),
            "reward_last": round(self.reward_last, 4),
            "steps": len(self.train_rewards),
            "updates": len(self.reports),
            "staged": self.staged,
            "interrupted": self.interrupted,
            "pause_ms_p50": round(self.pause_ms(0.50), 2),
            "pause_ms_p99": round(self.pause_ms(0.99), 2),
            "swap_ms": round(self.swap_ms, 2),
            "longest_token_gap_ms": round(self.counts.longest_token_gap_ms, 1),
            "requests": self.counts.requests,
            "requests_lost": self.counts.lost,
            "versions": len(self.counts.tokens_by_version),
            "tokens_checked": self.verdict.tokens,
            "mixed_tokens": self.verdict.mixed,
            "logprob_error_max": self.verdict.worst,
            "seconds": round(self.seconds, 1),
        }


def run_demo(
    plan: DemoPlan, *, say: Callable[[str], None], progress: Callable[[DemoResult, int], None]
) -> DemoResult:
    """Runs the demo, and returns its results.

    Args:
        plan: the options of the run.
        say: called with a line of text for each event.
        progress: called with the results so far and the version that engines serve.

    Raises:
        WavebusError: a process ended, or the bus refused a request.
    """
    started_s = time.monotonic()
    torch.set_num_threads(1)
    config = GrpoConfig()
    shape = PolicyConfig(experts=_EXPERTS) if plan.dp_size > 1 else PolicyConfig()
    policy = make_policy(shape, seed=plan.seed)
    weights = {0: copy_of(policy)}
    result = DemoResult(plan)
    with tempfile.TemporaryDirectory(prefix="wavebus-demo-") as name:
        folder = Path(name)
        save_checkpoint(policy, folder / "checkpoint")
        with Processes(folder) as processes:
            address = processes.broker()
            say(
                f"training for at most {plan.limit_s:.0f} s, with {plan.engine_count} engines and "
                f"the broker at {address}; logs in {folder}"
            )
            for index in range(plan.engine_count):
                processes.sidecar(
                    f"engine-{index}",
                    plan.engine,
                    address,
                    folder / "checkpoint",
                    dp_size=plan.dp_size,
                    dp_coordinator=plan.dp_coordinator,
                    options=_PACE if plan.engine == "embedded" else (),
                )
            with SyncTrainerAgent(address, group=GROUP, name="trainer") as agent:
                engines = _wait(agent, processes, result.endpoints)
                say(", ".join(f"{e.name}: {e.software} at {e.endpoint}" for e in engines))
                with RolloutPool(address, config, 4 * len(engines), plan.seed) as pool:
                    result.counts = pool.counts
                    learner = GrpoLearner(policy, config)
                    for served in _train(agent, learner, pool, result, weights, started_s):
                        processes.check()
                        progress(result, served)
                    for why, times in pool.counts.why_lost.most_common(5):
                        say(f"lost {times} × {why}")
            processes.check()
    result.verdict = judge(shape, weights, pool.rollouts)
    result.seconds = time.monotonic() - started_s
    return result


def _wait(agent: SyncTrainerAgent, processes: Processes, count: int) -> list[EngineView]:
    """Waits for the engines; raises ``WavebusError`` if a process ends meanwhile."""
    deadline = time.monotonic() + _BOOT_S
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
    result: DemoResult,
    weights: dict[int, dict[str, Tensor]],
    started_s: float,
) -> Iterator[int]:
    """Trains until a limit is reached; yields the version that engines serve after each step."""
    plan = result.plan

    def publish() -> None:
        """Sends the new weights to the engines."""
        version = agent.update_weights(learner.policy, label=f"step {learner.steps}", how=plan.how)
        weights[version] = copy_of(learner.policy)
        assert agent.last_update is not None
        result.reports[learner.steps] = agent.last_update

    def evaluate() -> None:
        result.greedy.append((learner.steps, pool.greedy_reward()))

    evaluate()
    yield max(weights)
    while (
        learner.steps < STEPS
        and (plan.updates is None or len(result.reports) < plan.updates)
        and time.monotonic() - started_s < plan.limit_s
        and result.reward_last < _ENOUGH
    ):
        groups = pool.take(learner.cfg.groups)
        stats = learner.step(groups) if plan.withhold_weights else learner.step(groups, publish)
        result.train_rewards.append(stats.reward)
        if learner.steps % _EVAL_EVERY_STEPS == 0:
            evaluate()
        yield max(weights)
    evaluate()
    yield max(weights)
