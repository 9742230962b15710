"""Casts of a trainer's weights lose nothing that engines keep."""

from __future__ import annotations

import pytest
import torch

from bus._kept_dtypes import kept_patterns, kept_refusal
from trainer_agent._weights.cast import CastSource
from trainer_agent._weights.source import PairSource

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_tensor_has_the_dtype_that_the_engines_report(dtype: str) -> None:
    """Beside float8 weights, scales; a router's bias; decays of a state space model. Two engines
    report other tensors each, as on pipeline shards; the rest is cast."""
    values = torch.linspace(0.5, 0.51, 256)
    sent = {
        **{f"layers.{n}.q_proj.weight": torch.ones(4, 4).to(torch.float8_e4m3fn) for n in (0, 1)},
        **{f"layers.{n}.q_proj.weight_scale": torch.tensor(0.1 + n) for n in (0, 1)},
        **{f"layers.{n}.q_proj.weight_scale_inv": values.reshape(16, 16) for n in (0, 1)},
        **{f"layers.{n}.mixer.A_log": values for n in (0, 1)},
        **{f"layers.{n}.gate.e_score_correction_bias": values for n in (0, 1)},
        **{f"layers.{n}.norm.weight": values for n in (0, 1)},
    }
    cast = CastSource(PairSource(sent), dtype)
    reports = (
        ["layers.0.q_proj.weight_scale", "layers.0.q_proj.weight_scale_inv"],
        ["layers.1.mixer.A_log", "layers.1.gate.e_score_correction_bias"],
    )
    for report in reports:
        assert cast.keep(kept_patterns(kept_refusal(report).detail))
    names = [meta.name.split(".", 2)[2] for meta in cast.metadata()]
    assert dict(zip(names, dtypes(cast), strict=True)) == {
        "q_proj.weight": "float8_e4m3fn",
        "q_proj.weight_scale": "float32",
        "q_proj.weight_scale_inv": "float32",
        "mixer.A_log": "float32",
        "gate.e_score_correction_bias": "float32",
        "norm.weight": dtype,
    }
    for name, tensor in cast:
        same = torch.equal(tensor.float(), sent[name].float())
        assert same == (not name.endswith("norm.weight"))
    assert cast.is_lossy


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
