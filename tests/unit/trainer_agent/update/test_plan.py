"""A plan looks at what is sent, chunk by chunk."""

from __future__ import annotations

import json

import pytest
import torch

import bus.log
from bus.errors import NonFiniteWeights
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._weights.source import PairSource

NAN = float("nan")


def test_the_first_nan_is_named_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are; and none, where all is finite."""
    monkeypatch.setattr(bus.log, "_settings", bus.log._Settings(json=True))
    tensors = {name: torch.ones(8) for name in "abcd"}
    plan = UpdatePlan.of_source(PairSource(tensors).metadata(), chunk_bytes=64)
    assert plan.chunks == 2
    chunks = [[tensors["a"], tensors["b"]], [tensors["c"], tensors["d"]]]
    for seq, chunk in enumerate(chunks):
        plan.sums(seq, chunk, "sample")
    plan.warn_of_nonfinite("u1")
    assert capsys.readouterr().err == ""
    for name in "bcd":
        tensors[name][3] = NAN
    for seq, chunk in enumerate(chunks):
        plan.sums(seq, chunk, "sample")
    plan.warn_of_nonfinite("u2")
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["event"], line["level"]) == ("weights_not_finite", "warning")
    assert (line["update_id"], line["tensor"]) == ("u2", "b")
    plan = UpdatePlan.of_source(plan.metas, chunk_bytes=64)
    plan.check_finite = True
    with pytest.raises(NonFiniteWeights, match=r"^source: c contains NaN or Inf") as caught:
        plan.sums(1, chunks[1], "off")
    assert caught.value.tensor == "c"
