"""Group-relative policy optimization (GRPO) with stale rollouts of several weight versions.

Each token has the log-probability with which it was sampled, so the loss needs no copy of old
weights: the probability ratio of each token is clipped as in PPO. This module does not depend on
how weights reach the engines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.demo.policy import Policy


@dataclass(frozen=True)
class Rollout:
    """One sampled response to a prompt.

    Attributes:
        prompt_ids: the prompt's token ids.
        response_ids: the response's token ids.
        logprobs: the response tokens' log-probabilities (natural, temperature 1) when sampled.
        reward: the reward, in [0, 1].
        versions: the version of the weights that sampled each response token.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids:
            raise ValueError("a rollout needs a prompt and a response")
        if not len(self.response_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError("a rollout needs one log-probability and version per token")


@dataclass(frozen=True)
class GrpoConfig:
    """Hyperparameters, tuned for ``PolicyConfig()`` and the cipher task.

    Attributes:
        groups: the number of prompts per step.
        group_size: the number of responses per prompt.
        lr: the peak of the learning rate, after ``warmup_steps``. The rate then falls linearly to
            ``final_lr_share`` of the peak at ``decay_steps``.
        betas: the betas of the optimizer, AdamW.
        clip_low, clip_high: how far a token's ratio may be below and above 1.
        negative_cap: the greatest ratio of tokens with a negative advantage.
        entropy: the weight of the mean token entropy, in nats, in the loss.
        grad_clip: the greatest norm of the gradient.
    """

    groups: int = 4
    group_size: int = 16
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 40
    decay_steps: int = 1000
    final_lr_share: float = 0.1
    clip_low: float = 0.2
    clip_high: float = 0.4
    negative_cap: float = 3.0
    entropy: float = 0.04
    grad_clip: float = 1.0


@dataclass(frozen=True)
class StepStats:
    """The result of one optimizer step.

    Attributes:
        reward: the mean reward of its rollouts.
        grad_norm: the norm of the gradient before it was clipped.
        updated: whether the weights changed; they don't if the loss is not finite.
    """

    reward: float
    grad_norm: float
    updated: bool


@dataclass(frozen=True)
class Batch:
    """Rollouts as right-padded tensors.

    Attributes:
        inputs: token ids, of shape (rollouts, time).
        target: the token id that follows each input, of the same shape.
        weight: 1 where the target is a token of the response, else 0; same shape.
        behaviour: the target's log-probability when it was sampled; same shape.
        advantage: each rollout's advantage, of shape (rollouts,).
    """

    inputs: Tensor
    target: Tensor
    weight: Tensor
    behaviour: Tensor
    advantage: Tensor


def advantages(rewards: Sequence[float]) -> list[float]:
    """Returns one group's rewards minus their mean, divided by their standard deviation."""
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (spread + 1e-3) for r in rewards]


def collate(groups: Sequence[Sequence[Rollout]]) -> Batch:
    """Returns the groups' rollouts as one batch, with targets shifted by one token."""
    flat = [rollout for group in groups for rollout in group]
    time = max(len(r.prompt_ids) + len(r.response_ids) for r in flat)

    def padded(left: Sequence[float], right: Sequence[float]) -> list[float]:
        return [*left, *right, *[0] * (time - len(left) - len(right))]

    ids = torch.tensor([padded(r.prompt_ids, r.response_ids) for r in flat], dtype=torch.long)
    before = [[0.0] * len(r.prompt_ids) for r in flat]
    ones = [[1.0] * len(r.response_ids) for r in flat]
    weight = torch.tensor([padded(b, o) for b, o in zip(before, ones, strict=True)])
    behaviour = torch.tensor([padded(b, r.logprobs) for b, r in zip(before, flat, strict=True)])
    scores = [a for group in groups if group for a in advantages([r.reward for r in group])]
    return Batch(ids[:, :-1], ids[:, 1:], weight[:, 1:], behaviour[:, 1:], torch.tensor(scores))


class GrpoLearner:
    """Trains one policy in place, with an AdamW optimizer."""

    def __init__(self, policy: Policy, cfg: GrpoConfig) -> None:
        self.policy = policy
        self.cfg = cfg
        self.steps = 0
        self._adam = torch.optim.AdamW(
            policy.parameters(), lr=cfg.lr, betas=cfg.betas, weight_decay=0.0
        )

    def step(
        self,
        groups: Sequence[Sequence[Rollout]],
        updated: Callable[[], None] = lambda: None,
    ) -> StepStats:
        """Makes one optimizer step. A loss that is not finite changes no weights.

        Args:
            groups: the rollouts; those of one group share a prompt.
            updated: called after the weights have changed.
        """
        flat = [rollout for group in groups for rollout in group]
        if not flat:
            raise ValueError("a step needs at least one rollout")
        for setting in self._adam.param_groups:
            setting["lr"] = self.learning_rate(self.steps)
        loss = self._loss(collate(groups))
        self._adam.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.cfg.grad_clip)
        finite = bool(norm.isfinite() & loss.isfinite())
        if finite:
            self._adam.step()
            updated()
        self.steps += 1
        return StepStats(sum(each.reward for each in flat) / len(flat), float(norm), finite)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        rise = min(1.0, (step + 1) / max(1, self.cfg.warmup_steps))
        fall = max(self.cfg.final_lr_share, 1.0 - step / max(1, self.cfg.decay_steps))
        return self.cfg.lr * rise * fall

    def _loss(self, batch: Batch) -> Tensor:
        cfg, weight, gain = self.cfg, batch.weight, batch.advantage[:, None]
        logs = functional.log_softmax(self.policy(batch.inputs, use_cache=False).logits, dim=-1)
        chosen = logs.gather(-1, batch.target[..., None]).squeeze(-1)
        ratio = ((chosen - batch.behaviour) * weight).clamp(max=20.0).exp()
        bounded = ratio.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
        worth = torch.minimum(ratio * gain, bounded * gain)
        worth = torch.where(gain < 0, torch.maximum(worth, cfg.negative_cap * gain), worth)
        entropy = -(logs.exp() * logs).sum(-1)
        return -((worth + cfg.entropy * entropy) * weight).sum() / weight.sum()
