"""Group-relative policy optimisation that tolerates stale, mixed-version rollouts.

Each token carries the log-probability under which it was really sampled, so the loss needs
no copy of old weights: the per-token ratio to that behaviour is clipped as in PPO, whichever
weight versions took part. Nothing here knows how weights reach the engines.
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

    from trainer_agent.demo.policy import Policy


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    ``logprobs`` are natural logs at temperature 1 under the weights that sampled each token
    and ``versions`` number those weights; both have one entry per response token.
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
    """Settings found by experiment for ``PolicyConfig()`` and the cipher task.

    One ``step`` makes ``epochs * minibatches`` AdamW updates. The learning rate climbs over
    ``warmup_steps``, then falls in a straight line to ``final_lr_share`` of its peak at
    ``decay_steps``, all counted in calls of ``step``. ``negative_cap`` bounds the ratio for
    tokens of negative advantage. ``entropy`` weighs the mean token entropy, in nats.
    ``groups`` and ``group_size`` are what the caller should gather for one step.
    """

    groups: int = 4
    group_size: int = 16
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 40
    decay_steps: int = 1000
    final_lr_share: float = 0.1
    epochs: int = 1
    minibatches: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.4
    negative_cap: float = 3.0
    entropy: float = 0.04
    grad_clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class StepStats:
    """Means over one step's updates; ``kl`` (nats per token) is from behaviour to policy.

    ``mixed`` is the share of rollouts sampled under more than one weight version, ``tokens``
    the number of response tokens, ``clipped`` the share of them without gradient from reward
    and ``skipped`` the number of updates dropped because their loss was not finite.
    """

    loss: float
    reward: float
    entropy: float
    clipped: float
    kl: float
    grad_norm: float
    mixed: float
    tokens: int
    skipped: int


@dataclass(frozen=True)
class Batch:
    """Right-padded tensors (rollouts, time); ``weight`` is 1 where ``target`` was sampled."""

    inputs: Tensor
    target: Tensor
    weight: Tensor
    behaviour: Tensor
    advantage: Tensor


def advantages(rewards: Sequence[float]) -> list[float]:
    """Centre one group's rewards and divide by their deviation; equal rewards give zeros."""
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (spread + 1e-3) for r in rewards]


def collate(groups: Sequence[Sequence[Rollout]]) -> Batch:
    """Lay the groups' rollouts out as one batch, shifted so that inputs predict targets."""
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
    """Owns the optimiser of one policy and updates that policy in place."""

    def __init__(self, policy: Policy, cfg: GrpoConfig) -> None:
        self.policy = policy
        self.cfg = cfg
        self.steps = 0
        self._adam = torch.optim.AdamW(
            policy.parameters(), lr=cfg.lr, betas=cfg.betas, weight_decay=0.0
        )
        self._shuffle = torch.Generator().manual_seed(cfg.seed)

    def step(
        self,
        groups: Sequence[Sequence[Rollout]],
        updated: Callable[[], None] = lambda: None,
    ) -> StepStats:
        """Improve the policy on groups of rollouts, each group sharing one prompt.

        ``updated`` is called after every optimizer step, when the weights are new.
        """
        flat = [rollout for group in groups for rollout in group]
        if not flat:
            raise ValueError("a step needs at least one rollout")
        batch = collate(groups)
        for setting in self._adam.param_groups:
            setting["lr"] = self.learning_rate(self.steps)
        means, skipped = torch.zeros(5), 0
        updates = [
            rows
            for _ in range(self.cfg.epochs)
            for rows in torch.randperm(len(flat), generator=self._shuffle).chunk(
                self.cfg.minibatches
            )
        ]
        for rows in updates:
            values, finite = self._update(batch, rows)
            if finite:
                means += values / len(updates)
            skipped += not finite
            if finite:
                updated()
        self.steps += 1
        loss, entropy, clipped, kl, grad_norm = means.tolist()
        score = sum(r.reward for r in flat) / len(flat)
        mixed = sum(len(set(r.versions)) > 1 for r in flat) / len(flat)
        tokens = sum(len(r.response_ids) for r in flat)
        return StepStats(loss, score, entropy, clipped, kl, grad_norm, mixed, tokens, skipped)

    def learning_rate(self, step: int) -> float:
        """Return the rate for the given zero-based step."""
        rise = min(1.0, (step + 1) / max(1, self.cfg.warmup_steps))
        fall = max(self.cfg.final_lr_share, 1.0 - step / max(1, self.cfg.decay_steps))
        return self.cfg.lr * rise * fall

    def _update(self, batch: Batch, rows: Tensor) -> tuple[Tensor, bool]:
        """Make one AdamW update; return loss, entropy, clipped, KL, norm, and if it was finite."""
        cfg, weight = self.cfg, batch.weight[rows]
        gain = batch.advantage[rows, None]
        logs = functional.log_softmax(self.policy(batch.inputs[rows]), dim=-1)
        chosen = logs.gather(-1, batch.target[rows, :, None]).squeeze(-1)
        gap = (chosen - batch.behaviour[rows]) * weight
        ratio = gap.clamp(max=20.0).exp()
        bounded = ratio.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
        worth = torch.minimum(ratio * gain, bounded * gain)
        worth = torch.where(gain < 0, torch.maximum(worth, cfg.negative_cap * gain), worth)
        count = weight.sum()
        entropy = (-(logs.exp() * logs).sum(-1) * weight).sum() / count
        loss = -(worth * weight).sum() / count - cfg.entropy * entropy
        self._adam.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), cfg.grad_clip)
        finite = bool(norm.isfinite() & loss.isfinite())
        if finite:
            self._adam.step()
        with torch.no_grad():
            idle = ((gain > 0) & (ratio > 1.0 + cfg.clip_high)) | (
                (gain < 0) & ((ratio < 1.0 - cfg.clip_low) | (ratio > cfg.negative_cap))
            )
            kl = ((ratio - 1.0 - gap) * weight).sum() / count
            clipped = (idle * weight).sum() / count
            return torch.stack((loss.detach(), entropy.detach(), clipped, kl, norm)), finite
