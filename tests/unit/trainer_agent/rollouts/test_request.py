"""What is refused before it is sent, and what an attempt that continues asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bus.errors import UsageError
from bus.messages import RequestLimits
from trainer_agent._rollouts.request import RolloutRequest, make_request

LIMITS = RequestLimits(vocab_size=100, max_model_len=64, slots=4, exact_seeds=True)
OTHER_SEEDS = RequestLimits(vocab_size=100, max_model_len=64, slots=4)
PROMPT = [5, 9, 77]


def request(prompt: Any = PROMPT, session: str | None = None, **params: Any) -> RolloutRequest:
    made = make_request(
        prompt, params, session_id=session, on_inexact="restart", decodes=False, extra={}
    )
    made.check(LIMITS)
    return made


def sampling(made: RolloutRequest, so_far: int, limits: RequestLimits = LIMITS) -> dict[str, Any]:
    body = made.body([1] * so_far, 0, 1, limits, 1)
    assert body["token_ids"] == PROMPT + [1] * so_far
    asked: dict[str, Any] = body["sampling_params"]
    return asked


@pytest.mark.parametrize(
    "prompt",
    [torch.tensor(PROMPT), np.array(PROMPT, np.int32), [np.int64(5), torch.tensor(9), 77]],
    ids=["tensor", "array", "list"],
)
def test_a_prompt_may_be_a_tensor_or_an_array(prompt: Any) -> None:
    assert request(prompt).prompt == tuple(PROMPT)


@pytest.mark.parametrize("prompt", [torch.ones(3), torch.ones(1, 3, dtype=torch.int64)])
def test_a_prompt_of_other_numbers_or_dimensions_is_refused(prompt: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="prompt_token_ids"):
        request(prompt)


@dataclass
class Choices:
    choice: list[str] | None = None
    regex: str | None = None
    disable_any_whitespace: bool = False
    _backend: str | None = "auto"


class Sampling(msgspec.Struct):
    """As vLLM's SamplingParams: its defaults, what concerns text, and what it keeps for itself."""

    temperature: float = 1.0
    max_tokens: int | None = 16
    top_k: int = 0
    logit_bias: dict[int, float] | None = None
    structured_outputs: Choices | None = None
    detokenize: bool = True
    prompt_logprobs: int | None = None
    _eos_token_id: int | None = None


def test_sampling_parameters_may_be_those_of_vllm() -> None:
    given = Sampling(
        temperature=0.5,
        logit_bias={3: 1.0},
        structured_outputs=Choices(["a"]),
        detokenize=False,
        _eos_token_id=7,
    )
    made = make_request(
        PROMPT, given, session_id=None, on_inexact="restart", decodes=False, extra={}
    )
    assert made.asked == {
        "temperature": 0.5,
        "max_tokens": 16,
        "logit_bias": {"3": 1.0},
        "structured_outputs": {"choice": ["a"]},
    }
    for wrong, field in (
        (Sampling(prompt_logprobs=1), "prompt_logprobs: no such field"),
        ("greedy", "sampling_params: is of type str"),
    ):
        with pytest.raises(UsageError, match=field):
            make_request(
                PROMPT, wrong, session_id=None, on_inexact="restart", decodes=False, extra={}
            )


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("prompt_token_ids: is empty", {"prompt": []}),
        ("prompt_token_ids", {"prompt": [-1]}),
        ("prompt_token_ids", {"prompt": "text"}),
        ("token 100 exceeds a vocabulary of 100", {"prompt": [100]}),
        ("prompt_token_ids: 64 tokens leave no room", {"prompt": [1] * 64}),
        ("session_id: has 1000000 characters", {"session": "x" * 1_000_000}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1}),
        ("tempertature", {"tempertature": 1.0}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        (r"sampling_params\.n", {"n": 1025}),
        ("sampling_params.stop: needs", {"stop": ["x"]}),
        ("stop_token_ids: token 100", {"stop_token_ids": [100]}),
        ("logit_bias: token 100", {"logit_bias": {"100": 1.0}}),
        ("min_tokens: 9 exceeds", {"min_tokens": 9, "max_tokens": 8}),
        ("top_p", {"top_p": 0.0}),
    ],
)
def test_bad_input_is_refused_by_the_field_at_fault(field: str, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=field):
        request(**bad)


def test_budgets_are_what_is_left() -> None:
    assert sampling(request(max_tokens=20, min_tokens=8), 0)["max_tokens"] == 20
    later = sampling(request(max_tokens=20, min_tokens=8), 15)
    assert (later["max_tokens"], later["min_tokens"]) == (5, 0)


def test_without_a_budget_the_models_length_is_one() -> None:
    assert sampling(request(), 0)["max_tokens"] == 61
    assert sampling(request(), 40)["max_tokens"] == 21
    assert sampling(request(max_tokens=1000), 40)["max_tokens"] == 21


def test_a_length_that_nobody_reports_has_to_be_given() -> None:
    made = make_request(PROMPT, {}, session_id=None, on_inexact="restart", decodes=False, extra={})
    with pytest.raises(UsageError, match="max_tokens: needed"):
        made.check(RequestLimits())


def test_a_seed_goes_on_where_draws_go_by_position_and_is_never_used_twice_elsewhere() -> None:
    made = request(seed=7)
    assert sampling(made, 10)["seed"] == 7
    assert not made.inexact(LIMITS)
    others = [sampling(made, so_far, OTHER_SEEDS)["seed"] for so_far in (0, 10, 20)]
    assert others[0] == 7
    assert len(set(others)) == 3
    assert made.inexact(OTHER_SEEDS) == ("seed",)


def test_a_continued_request_draws_other_numbers_from_every_generator() -> None:
    """torch's generator on CPUs takes the low 32 bits of a seed, as vLLM's V1 model runner seeds
    it; others take all. A negative seed is no exception."""
    for seed in (7, -3, 2**63 - 1):
        made = request(seed=seed)
        seeds = [sampling(made, so_far, OTHER_SEEDS)["seed"] for so_far in range(40)]
        drawn = {torch.rand((), generator=torch.Generator().manual_seed(s)).item() for s in seeds}
        assert len(drawn) == 40
        assert len({each % 2**32 for each in seeds}) == 40
        assert all(-(2**63) <= each < 2**63 for each in seeds)


def test_a_choice_that_goes_on_alone_draws_as_it_did() -> None:
    assert request(seed=7, n=3).body([1], 2, 1, LIMITS, 1)["sampling_params"]["seed"] == 9


def test_the_largest_seed_has_neighbours() -> None:
    made = request(seed=2**63 - 1, n=2)
    assert made.body([1], 1, 1, LIMITS, 1)["sampling_params"]["seed"] == -(2**63)


@pytest.mark.parametrize(
    ("params", "reasons"),
    [
        ({"temperature": 0.0}, ()),
        ({"repetition_penalty": 1.2, "logit_bias": {"3": 1.0}, "top_k": 5}, ()),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.0}, ("presence_penalty",)),
        ({"bad_words": ["x"], "structured_outputs": {}}, ("bad_words", "structured_outputs")),
    ],
)
def test_what_starts_anew_is_named(params: dict[str, Any], reasons: tuple[str, ...]) -> None:
    assert request(**params).inexact(LIMITS) == reasons


def test_unseeded_draws_stay_unseeded() -> None:
    assert "seed" not in sampling(request(temperature=1.0), 10, OTHER_SEEDS)
    assert not request(temperature=1.0).inexact(OTHER_SEEDS)
