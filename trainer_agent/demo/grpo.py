"""Group-relative policy optimisation that tolerates stale, mixed-version rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer_agent.demo.policy import Policy


@dataclass(frozen=True)
class Rollout:
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    versions: tuple[int, ...]


@dataclass(frozen=True)
class GrpoConfig:
    lr: float = 2e-3
    warmup: int = 5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.3
    dual_clip: float = 3.0
    entropy: float = 0.0
    grad_clip: float = 1.0
    epochs: int = 1
    minibatches: int = 2
    std_norm: float = 1.0
    seed: int = 0
    decay_steps: int = 0
    final_lr: float = 0.1


@dataclass(frozen=True)
class StepStats:
    loss: float
    reward: float
    entropy: float
    clip_fraction: float
    kl: float
    grad_norm: float
    tokens: int


class GrpoLearner:
    def __init__(self, policy: Policy, cfg: GrpoConfig) -> None:
        self.policy, self.cfg, self.steps = policy, cfg, 0
        self.opt = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=cfg.betas, weight_decay=cfg.weight_decay)
        self.gen = torch.Generator().manual_seed(cfg.seed)

    def step(self, groups: Sequence[Sequence[Rollout]]) -> StepStats:
        cfg = self.cfg
        flat = [r for g in groups for r in g]
        adv_l: list[float] = []
        for g in groups:
            rw = torch.tensor([r.reward for r in g])
            a = rw - rw.mean()
            if cfg.std_norm: a = a / (rw.std() + 1e-3) ** cfg.std_norm
            adv_l += a.tolist()
        adv = torch.tensor(adv_l)
        B = len(flat); P = max(len(r.prompt_ids) + len(r.response_ids) for r in flat)
        ids = torch.zeros(B, P, dtype=torch.long); resp = torch.zeros(B, P); old = torch.zeros(B, P)
        for i, r in enumerate(flat):
            p, n = len(r.prompt_ids), len(r.response_ids)
            ids[i, : p + n] = torch.tensor(r.prompt_ids + r.response_ids)
            resp[i, p : p + n] = 1
            old[i, p : p + n] = torch.tensor(r.logprobs)
        tgt, w, old = ids[:, 1:], resp[:, 1:], old[:, 1:]
        acc = [0.0] * 5; k = 0
        for _ in range(cfg.epochs):
            for idx in torch.randperm(B, generator=self.gen).chunk(cfg.minibatches):
                for gr in self.opt.param_groups:
                    f = min(1.0, (self.steps + 1) / max(1, cfg.warmup))
                    if cfg.decay_steps: f *= max(cfg.final_lr, 1 - self.steps / cfg.decay_steps)
                    gr["lr"] = cfg.lr * f
                lp = F.log_softmax(self.policy(ids[idx, :-1]), -1)
                new = lp.gather(-1, tgt[idx][..., None])[..., 0]
                m = w[idx]; n = m.sum()
                ratio = ((new - old[idx]) * m).exp(); a = adv[idx][:, None]
                obj = torch.minimum(ratio * a, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * a)
                obj = torch.where(a < 0, torch.maximum(obj, cfg.dual_clip * a), obj)
                ent = (-(lp.exp() * lp).sum(-1) * m).sum() / n
                loss = -(obj * m).sum() / n - cfg.entropy * ent
                self.opt.zero_grad(); loss.backward()
                gn = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), cfg.grad_clip)
                self.opt.step()
                with torch.no_grad():
                    cf = ((((ratio - 1) * a.sign() > torch.where(a > 0, cfg.clip_high, cfg.clip_low)) * m).sum() / n)
                    kl = ((ratio - 1 - ratio.clamp(min=1e-6).log()) * m).sum() / n
                for j, x in enumerate((loss, ent, cf, kl, gn)): acc[j] += float(x)
                k += 1
        self.steps += 1
        acc = [x / k for x in acc]
        return StepStats(acc[0], sum(r.reward for r in flat) / B, acc[1], acc[2], acc[3], acc[4], int(w.sum()))
