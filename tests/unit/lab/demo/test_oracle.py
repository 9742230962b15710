"""The demo's oracle tells tokens of one version's weights from all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from lab.demo.learner import Rollout
from lab.demo.oracle import judge
from lab.demo.policy import make_policy
from lab.network import PolicyConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

SHAPE = PolicyConfig()
PROMPT = (1, 5, 6, 7, 3)
ANSWER = (8, 9, 10, 4, 5, 2)


def weights(seed: int) -> dict[str, Tensor]:
    return {
        name: each.detach() for name, each in make_policy(SHAPE, seed=seed).state_dict().items()
    }


def logprobs(of: Mapping[str, Tensor]) -> list[float]:
    """Of the answer's tokens."""
    policy = make_policy(SHAPE)
    policy.load_state_dict(dict(of))
    tokens = torch.tensor([[*PROMPT, *ANSWER]])
    with torch.inference_mode():
        logs = functional.log_softmax(policy(tokens[:, :-1]).logits, dim=-1)
    chosen = logs.gather(-1, tokens[:, 1:, None]).squeeze(-1)[0]
    found: list[float] = chosen[len(PROMPT) - 1 :].tolist()
    return found


def rollout(told: Sequence[float], versions: Sequence[int]) -> Rollout:
    return Rollout(PROMPT, ANSWER, tuple(told), 0.0, tuple(versions))


def test_tokens_of_their_versions_are_clean() -> None:
    """Also where an answer has two of them."""
    old, new = weights(1), weights(2)
    told = [*logprobs(old)[:2], *logprobs(new)[2:]]
    verdict = judge(SHAPE, {3: old, 4: new}, [rollout(told, [3, 3, 4, 4, 4, 4])] * 3)
    assert (verdict.tokens, verdict.mixed) == (18, 0)
    assert verdict.worst < 1e-5


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_one_tensor_of_another_version_is_seen(name: str) -> None:
    """In every token that it could have a part in."""
    old, new = weights(1), weights(2)
    mixed = {**new, name: old[name]}
    verdict = judge(SHAPE, {4: new}, [rollout(logprobs(mixed), [4] * len(ANSWER))])
    assert verdict.mixed == len(ANSWER)


def test_tokens_told_under_the_wrong_version_are_seen() -> None:
    """The switch is one token too early."""
    old, new = weights(1), weights(2)
    told = [*logprobs(old)[:3], *logprobs(new)[3:]]
    verdict = judge(SHAPE, {3: old, 4: new}, [rollout(told, [3, 3, 4, 4, 4, 4])])
    assert verdict.mixed == 1


def test_tokens_of_a_version_that_nobody_committed_are_mixed() -> None:
    """All of them."""
    verdict = judge(SHAPE, {}, [rollout(logprobs(weights(1)), [7] * len(ANSWER))])
    assert (verdict.tokens, verdict.mixed) == (0, len(ANSWER))
