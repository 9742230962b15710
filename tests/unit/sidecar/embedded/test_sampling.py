"""Sampling: deterministic where it promises to be, and of the right distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sidecar._embedded.sampling import (
    SamplingBatch,
    SamplingParams,
    choice_seed,
    raw_logprobs,
    uniforms,
)

VOCAB = 16
# The first outputs of SplitMix64 from state 1234567, as its author's code gives them.
SPLITMIX = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def _logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def _draw(params: SamplingParams, logits: torch.Tensor, count: int, seed: int = 7) -> list[int]:
    """``count`` tokens of one request, from the same logits each time."""
    batch = SamplingBatch([params], [choice_seed(seed, 0)], VOCAB)
    return [batch.sample(logits, [place])[0] for place in range(count)]


def test_random_numbers_are_those_of_splitmix64() -> None:
    """Known values: nobody's seed changes its tokens by accident."""
    numbers = uniforms(np.full(5, 1234567, np.uint64), np.arange(5, dtype=np.uint64))
    assert (numbers * 2.0**48).astype(np.uint64).tolist() == [value >> 16 for value in SPLITMIX]


def test_random_numbers_are_uniform() -> None:
    """Ten bins of equal size, over seeds and over counts."""
    for seeds, counts in ((1, 10_000), (10_000, 1)):
        seed = np.array([choice_seed(s, 0) for s in range(seeds)], dtype=np.uint64)
        numbers = uniforms(
            np.repeat(seed, counts), np.tile(np.arange(counts, dtype=np.uint64), seeds)
        )
        assert numbers.min() >= 0
        assert numbers.max() < 1
        bins, _ = np.histogram(numbers, bins=10, range=(0, 1))
        assert abs(bins - 1000).max() < 150


def test_choices_of_one_seed_differ() -> None:
    """n choices of a request are n samples, not one sample n times."""
    seeds = [choice_seed(5, index) for index in range(64)]
    assert len(set(seeds)) == 64
    assert seeds != [choice_seed(6, index) for index in range(64)]
    assert choice_seed(-1, 0) == choice_seed(2**64 - 1, 0)


def test_temperature_zero_takes_the_likeliest() -> None:
    """So does one that is next to zero, as in vLLM."""
    logits = _logits()
    likeliest = int(logits.argmax())
    for temperature in (0.0, 1e-6):
        assert set(_draw(SamplingParams(temperature=temperature), logits, 20)) == {likeliest}


def test_the_same_seed_gives_the_same_tokens_in_any_company() -> None:
    """Whatever row it has, and whatever its neighbours ask for."""
    mine = SamplingParams(temperature=0.9)
    logits = _logits(rows=4)
    alone = SamplingBatch([mine], [choice_seed(3, 0)], VOCAB)
    expected = [alone.sample(logits[2:3], [place])[0] for place in range(50)]
    neighbours = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.5),
        mine,
        SamplingParams(top_k=2, temperature=1.7),
    ]
    batch = SamplingBatch(neighbours, [choice_seed(s, 0) for s in (1, 2, 3, 4)], VOCAB)
    company = [batch.sample(logits, [5, 9, place, 0])[2] for place in range(50)]
    assert company == expected
    assert len(set(expected)) > 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_under_temperature(temperature: float) -> None:
    """Within four standard deviations for every token."""
    logits = _logits(seed=4)
    count = 4000
    drawn = _draw(SamplingParams(temperature=temperature), logits, count)
    expected = torch.softmax(logits[0] / temperature, -1)
    frequency = torch.bincount(torch.tensor(drawn), minlength=VOCAB) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((frequency - expected).abs() < 4 * deviation + 1e-3).all()


def test_top_k_draws_from_the_k_likeliest() -> None:
    """All of them, and none else."""
    logits = _logits(seed=1)
    drawn = _draw(SamplingParams(temperature=3.0, top_k=4), logits, 300)
    assert set(drawn) == set(logits[0].topk(4).indices.tolist())


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 5])
def test_a_top_k_of_everything_cuts_nothing(top_k: int) -> None:
    """0 and -1 mean everything, too."""
    logits = _logits(seed=1)
    params = SamplingParams(temperature=3.0, top_k=top_k)
    assert _draw(params, logits, 100) == _draw(SamplingParams(temperature=3.0), logits, 100)


def test_top_p_draws_from_the_smallest_set_that_has_p() -> None:
    """The token that passes p belongs to it."""
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1] + [1e-9] * (VOCAB - 4)]))
    for top_p, support in ((0.39, {0}), (0.5, {0, 1}), (0.69, {0, 1}), (0.75, {0, 1, 2})):
        assert set(_draw(SamplingParams(top_p=top_p), logits, 300)) == support


def test_top_p_counts_what_top_k_left() -> None:
    """First top_k, then top_p of the rest, as in vLLM."""
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1] + [1e-9] * (VOCAB - 4)]))
    # Of the first two, token 0 has 4/7 = 0.57: it alone has half of them.
    assert set(_draw(SamplingParams(top_k=2, top_p=0.5), logits, 200)) == {0}
    assert set(_draw(SamplingParams(top_k=2, top_p=0.6), logits, 200)) == {0, 1}


def test_impossible_tokens_are_never_drawn() -> None:
    """Probability zero has no width, at the ends neither."""
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 3] = logits[0, 9] = 0.0
    assert set(_draw(SamplingParams(), logits, 300)) == {3, 9}


def test_logits_that_are_not_numbers_crash_nothing() -> None:
    """Broken weights give broken tokens, which exist."""
    logits = torch.full((1, VOCAB), float("nan"))
    for params in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.5)):
        assert all(0 <= token < VOCAB for token in _draw(params, logits, 5))


def test_logprobs_are_the_model_s_own() -> None:
    """Before temperature and cuts."""
    logits = _logits(rows=3)
    expected = torch.log_softmax(logits, -1)[torch.arange(3), torch.tensor([1, 0, 15])]
    assert raw_logprobs(logits, [1, 0, 15]) == pytest.approx(expected.tolist(), abs=1e-5)
