"""Casts of a trainer's weights lose nothing that engines keep."""

from __future__ import annotations

import torch

from trainer_agent.weights.cast import CastSource
from trainer_agent.weights.source import PairSource

BIAS = "model.layers.3.mlp.gate.e_score_correction_bias"


def source(bias: torch.dtype = torch.float32) -> PairSource:
    return PairSource(
        {
            "model.layers.3.q_proj.weight": torch.rand(4, 4),
            BIAS: torch.linspace(0.5, 0.51, 256).to(bias),
            "steps": torch.arange(3),
        }
    )


def dtypes(cast: CastSource) -> list[str]:
    assert [str(t.dtype) for _, t in cast] == [f"torch.{m.dtype}" for m in cast.metadata()]
    return [meta.dtype for meta in cast.metadata()]


def test_what_engines_keep_is_sent_as_it_is() -> None:
    """From the refusal on, and in all later updates of the agent."""
    kept: set[str] = set()
    cast = CastSource(source(), "bfloat16", kept)
    assert (dtypes(cast), cast.is_lossy) == (["bfloat16", "bfloat16", "int64"], True)
    assert cast.keep(frozenset({"model.layers.*.mlp.gate.e_score_correction_bias"}))
    assert dtypes(cast) == ["bfloat16", "float32", "int64"]
    assert len(set(dict(cast)[BIAS].tolist())) == 256
    assert cast.is_lossy
    again = CastSource(source(), "bfloat16", kept)
    assert dtypes(again) == ["bfloat16", "float32", "int64"]
    assert not again.keep(frozenset(kept))


def test_what_the_trainer_has_in_less_is_cast_as_before() -> None:
    """The engine widens it, and nothing is lost."""
    cast = CastSource(source(torch.bfloat16), "bfloat16")
    assert not cast.keep(frozenset({"model.layers.*.mlp.gate.e_score_correction_bias"}))
    assert dtypes(cast) == ["bfloat16", "bfloat16", "int64"]


def test_float64_is_sent_as_float32_where_that_is_kept() -> None:
    cast = CastSource(source(torch.float64), "bfloat16")
    assert cast.keep(frozenset({"model.layers.*.mlp.gate.e_score_correction_bias"}))
    assert dtypes(cast) == ["bfloat16", "float32", "int64"]


def test_a_cast_to_float32_loses_nothing() -> None:
    assert not CastSource(source(), "float32").is_lossy
    assert not CastSource(PairSource({"a": torch.ones(2).bfloat16()}), "bfloat16").is_lossy
