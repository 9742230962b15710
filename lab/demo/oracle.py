"""Checks that each token was sampled with the weights of its version.

An engine reports each token's log-probability and version. The policy of that version, given the
same prompt and the same earlier tokens, must compute the same value. Updates of the demo discard
keys and values, so tokens after an update depend on the new weights alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

from lab.demo.learner import collate
from lab.demo.policy import Policy, make_policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lab.demo.learner import Rollout
    from lab.network import PolicyConfig

# Engines sum in another order, in float32.
TOLERANCE: Final = 5e-5
_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check.

    Attributes:
        tokens: how many tokens were checked.
        mixed: how many tokens were not sampled with the weights of their version.
        worst: the largest difference of a log-probability among the other tokens, in nats.
    """

    tokens: int = 0
    mixed: int = 0
    worst: float = 0.0


def judge(
    shape: PolicyConfig, weights: Mapping[int, Mapping[str, Tensor]], rollouts: Sequence[Rollout]
) -> Verdict:
    """Checks every token of every rollout.

    Args:
        shape: the sizes of the policy.
        weights: each version's state dict. Tokens of any other version count as mixed.
        rollouts: the complete rollouts.
    """
    policy = make_policy(shape)
    tokens = mixed = 0
    worst = 0.0
    for version in sorted({version for each in rollouts for version in each.versions}):
        those = [each for each in rollouts if version in each.versions]
        if version not in weights:
            mixed += sum(each.versions.count(version) for each in those)
            continue
        policy.load_state_dict(dict(weights[version]))
        for begin in range(0, len(those), _ROWS):
            off = _differences(policy, those[begin : begin + _ROWS], version)
            wrong = off > TOLERANCE
            tokens += len(off)
            mixed += int(wrong.sum())
            worst = max(worst, float(off[~wrong].max()) if bool((~wrong).any()) else 0.0)
    return Verdict(tokens, mixed, worst)


def _differences(policy: Policy, rollouts: Sequence[Rollout], version: int) -> Tensor:
    """Returns by how much the reported log-probabilities of ``version`` are wrong, in nats."""
    batch = collate([rollouts])
    compared = torch.zeros_like(batch.behaviour, dtype=torch.bool)
    for row, each in enumerate(rollouts):
        first = len(each.prompt_ids) - 1
        for place, of in enumerate(each.versions):
            compared[row, first + place] = of == version
    with torch.inference_mode():
        logs = functional.log_softmax(policy(batch.inputs, use_cache=False).logits, dim=-1)
        chosen = logs.gather(-1, batch.target[..., None]).squeeze(-1)
    return (chosen - batch.behaviour).abs()[compared]
