"""The examples that bring all they need run through."""

from __future__ import annotations

import re

import pytest

from tests.support.examples import run_example


def test_the_colocated_one_loses_no_token() -> None:
    """A request lives through three sleeps, each with an update."""
    assert "200 of 200 tokens, by versions [0, 1, 2, 3]" in run_example("colocated.py")


@pytest.mark.ci
def test_openais_client_loses_nothing_through_the_gateway() -> None:
    """It checks every token itself; an engine dies, and weights change in the middle of answers."""
    printed = run_example("gateway_openai.py", "--seconds", "6")
    assert "no request was lost" in printed
    kinds = re.search(r"calls: {(.*)}", printed)
    assert kinds
    assert kinds[1].count(":") == 4
    mixed = re.search(r"answers of several versions: (\d+)", printed)
    assert mixed
    assert int(mixed[1]) > 0


@pytest.mark.slow
def test_asynchronous_grpo_learns_from_answers_of_several_versions() -> None:
    printed = run_example("async_grpo.py")
    mixed = re.search(r"(\d+) answers of 2 versions", printed)
    assert mixed
    assert int(mixed[1]) > 0


@pytest.mark.slow
def test_trl_learns_and_its_engines_have_its_weights() -> None:
    printed = run_example("trl_grpo.py", "--steps", "60")
    assert "mean reward" in printed
    assert "greedy answers of the engines that are the trainer's: 8 of 8" in printed
