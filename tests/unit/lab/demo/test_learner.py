"""The learner's advantages, batches and gradient directions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from lab.demo.learner import GrpoConfig, GrpoLearner, Rollout, advantages, collate
from lab.demo.policy import Policy, make_policy
from lab.network import PolicyConfig

PROMPT = (1, 5, 6, 7, 3)
GOOD, BAD = (8, 9, 10, 2), (11, 4, 2)


def score(policy: Policy, response: tuple[int, ...]) -> list[float]:
    """Return the log-probability, in nats, of each response token after PROMPT."""
    ids = torch.tensor([PROMPT + response])
    with torch.no_grad():
        logs = functional.log_softmax(policy(ids[:, :-1]).logits, -1)
    chosen = logs.gather(-1, ids[:, 1:, None])[0, len(PROMPT) - 1 :, 0]
    return [float(x) for x in chosen]


def rollout(policy: Policy, response: tuple[int, ...], reward: float, lag: float = 0.0) -> Rollout:
    """Return a rollout whose behaviour was ``lag`` nats below the policy at every token."""
    logs = tuple(x - lag for x in score(policy, response))
    return Rollout(PROMPT, response, logs, reward, (0,) * len(response))


def learner() -> GrpoLearner:
    """Return a learner that makes one plain update per step, without entropy bonus."""
    cfg = GrpoConfig(entropy=0.0, warmup_steps=1)
    return GrpoLearner(make_policy(PolicyConfig(), seed=2), cfg)


def test_advantages_are_centred_and_scaled() -> None:
    """A group's advantages have mean 0 and unit deviation and keep the order of rewards."""
    values = advantages([0.1, 0.2, 0.6, 0.9])
    assert sum(values) == pytest.approx(0, abs=1e-9)
    assert sum(v * v for v in values) / 4 == pytest.approx(1, abs=0.02)
    assert values == sorted(values)
    assert advantages([0.4, 0.4, 0.4]) == pytest.approx([0, 0, 0])


def test_batch_lines_up_tokens_with_their_logprobs() -> None:
    """Targets under the weight mask are the response tokens with their own log-probabilities."""
    policy = make_policy(PolicyConfig())
    group = [rollout(policy, GOOD, 1.0), rollout(policy, BAD, 0.0)]
    batch = collate([group])
    for row, item in enumerate(group):
        chosen = batch.weight[row].bool()
        assert tuple(batch.target[row][chosen].tolist()) == item.response_ids
        assert batch.behaviour[row][chosen].tolist() == pytest.approx(item.logprobs)


def test_rewarded_response_becomes_likelier() -> None:
    """One step raises the better response of a group and lowers the worse one."""
    learn = learner()
    before = [sum(score(learn.policy, r)) for r in (GOOD, BAD)]
    stats = learn.step([[rollout(learn.policy, GOOD, 1.0), rollout(learn.policy, BAD, 0.0)]])
    after = [sum(score(learn.policy, r)) for r in (GOOD, BAD)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert (stats.reward, stats.updated) == (0.5, True)
    assert stats.grad_norm > 0.1


def test_equal_rewards_leave_the_policy_alone() -> None:
    """A group without reward differences gives no gradient."""
    learn = learner()
    group = [rollout(learn.policy, GOOD, 0.5), rollout(learn.policy, BAD, 0.5)]
    assert learn.step([group]).grad_norm == pytest.approx(0, abs=1e-7)


def test_far_drift_is_clipped() -> None:
    """Tokens that already moved past the bound in their advantage's direction do not push."""
    learn = learner()
    group = [rollout(learn.policy, GOOD, 1.0, lag=1.0), rollout(learn.policy, BAD, 0.0, lag=2.0)]
    stats = learn.step([group])
    assert stats.grad_norm == pytest.approx(0, abs=1e-7)


def test_broken_logprobs_cannot_break_the_weights() -> None:
    """An update whose loss is not finite is dropped, and nobody is called."""
    learn, calls = learner(), []
    bad = replace(rollout(learn.policy, GOOD, 1.0), logprobs=(math.nan,) * len(GOOD))
    groups = [[bad, rollout(learn.policy, BAD, 0.0)]]
    assert not learn.step(groups, lambda: calls.append(learn.steps)).updated
    assert not calls
    assert all(weight.isfinite().all() for weight in learn.policy.parameters())


def test_malformed_rollouts_are_refused() -> None:
    """A rollout without one log-probability and version per token cannot be built."""
    with pytest.raises(ValueError, match="per token"):
        Rollout(PROMPT, GOOD, (0.0,), 1.0, (0,))
    with pytest.raises(ValueError, match="prompt and a response"):
        Rollout(PROMPT, (), (), 1.0, ())


def test_learning_rate_climbs_then_falls() -> None:
    """The rate warms up, decays in a straight line and stays at its floor."""
    learn = GrpoLearner(
        make_policy(PolicyConfig()), GrpoConfig(lr=1.0, warmup_steps=4, decay_steps=100)
    )
    rates = [learn.learning_rate(s) for s in (0, 3, 50, 99, 500)]
    assert rates == pytest.approx([0.25, 0.97, 0.5, 0.1, 0.1])
