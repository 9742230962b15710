"""The cipher task's rewards and prompt sets."""

from __future__ import annotations

from itertools import islice

import pytest

from lab.demo import task

PROMPT = (task.BOS, *(task.FIRST_LETTER + i % task.LETTERS for i in range(task.LENGTH)), task.SEP)


def test_right_answer_earns_one() -> None:
    """The answer itself, ending in EOS and fitting the token limit, earns exactly 1."""
    right = task.answer(PROMPT)
    assert right[-1] == task.EOS
    assert right[0] == task.FIRST_LETTER + task.SHIFT
    assert len(right) == task.MAX_TOKENS
    assert task.reward(PROMPT, right) == 1.0


def test_alphabet_wraps_round() -> None:
    """The last letter moves round to the start of the alphabet."""
    last = task.FIRST_LETTER + task.LETTERS - 1
    assert task.answer((task.BOS, last, task.SEP))[0] == task.FIRST_LETTER + task.SHIFT - 1


@pytest.mark.parametrize("response", [(), (task.PAD,) * 5, (task.EOS,), (task.SEP, task.BOS)])
def test_worthless_responses_earn_nothing(response: tuple[int, ...]) -> None:
    """An empty response, one of foreign tokens and an immediate EOS all earn 0."""
    assert task.reward(PROMPT, response) == 0.0


def test_every_place_counts_the_same() -> None:
    """One wrong place costs one share, wherever it stands, and a missing EOS costs one too."""
    right = task.answer(PROMPT)
    share = 1 / len(right)
    for place in range(len(right)):
        wrong = (*right[:place], task.PAD, *right[place + 1 :])
        assert task.reward(PROMPT, wrong) == pytest.approx(1 - share)
    assert task.reward(PROMPT, right[:-1]) == pytest.approx(1 - share)


def test_running_on_costs() -> None:
    """Tokens after the answer lower the reward, so it stays within [0, 1]."""
    right = task.answer(PROMPT)
    assert task.reward(PROMPT, right * 2) == pytest.approx(0.5)


def test_held_out_prompts_never_train() -> None:
    """The held-out set is fixed, has no repeats and shares no prompt with a training stream."""
    held = task.held_out()
    assert held == task.held_out()
    assert len(set(held)) == len(held) == 64
    assert not set(held) & set(islice(task.train_prompts(task.HELD_OUT_SEED), 2000))


def test_training_stream_follows_its_seed() -> None:
    """The same seed gives the same prompts, another seed gives others, all well formed."""
    first, again, other = (list(islice(task.train_prompts(s), 20)) for s in (1, 1, 2))
    assert first == again != other
    for prompt in first:
        assert prompt[0] == task.BOS
        assert prompt[-1] == task.SEP
        assert len(prompt) == task.LENGTH + 2
        assert max(prompt) < task.VOCAB_SIZE
