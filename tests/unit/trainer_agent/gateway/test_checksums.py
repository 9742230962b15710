"""The checksums of a group are those of each engine, or say which engines differ."""

from __future__ import annotations

import pytest

from trainer_agent._gateway.checksums import WeightChecksums
from trainer_agent._gateway.http_update import Conflict

SAME = {"tp0/a": "1", "tp0/b": "2"}


def test_equal_engines_have_one_answer_and_ranks_have_all() -> None:
    sums = WeightChecksums({"e0": SAME, "e1": dict(SAME), "e2": {"tp1/a": "3"}})
    assert sums.merged() == SAME | {"tp1/a": "3"}
    assert sums.mismatches(SAME | {"tp1/a": "3"}) == []


def test_engines_that_differ_are_named_with_their_tensors() -> None:
    sums = WeightChecksums({"e0": SAME, "e1": {"tp0/a": "1", "tp0/b": "9"}, "e2": SAME})
    with pytest.raises(Conflict, match=r"^e1 differs from e0 in 1 of 2 tensors: tp0/b$"):
        sums.merged()
    assert sums.mismatches(SAME) == ["tp0/b"]


def test_a_baseline_is_compared_with_all_of_all_engines() -> None:
    sums = WeightChecksums({"e0": SAME, "e1": SAME})
    assert sums.mismatches({"tp0/a": "1"}) == ["tp0/b"]
    assert sums.mismatches(SAME | {"tp0/c": "1"}) == ["tp0/c"]
