"""Which tensors an engine keeps in float32, from the engine's refusal to the trainer."""

from __future__ import annotations

from bus._kept_dtypes import kept_patterns, kept_refusal, pattern_of
from bus.messages import NackCode


def test_the_tensors_of_all_layers_are_one_pattern() -> None:
    names = [f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in range(61)]
    error = kept_refusal([*names, "a.A_log"])
    assert (error.code, error.tensor) == (NackCode.DTYPE_KEPT, names[0])
    assert kept_patterns(error.detail) == {
        "model.layers.*.mlp.gate.e_score_correction_bias",
        "a.A_log",
    }
    assert kept_patterns(f"e0: {error.detail}") == kept_patterns(error.detail)
    assert kept_patterns("something else") == frozenset()


def test_numbers_within_names_stay() -> None:
    assert pattern_of("h.12.w1.scale_2.0.x") == "h.*.w1.scale_2.*.x"


def test_many_patterns_come_in_several_refusals() -> None:
    """An engine's error is cut behind 2,000 characters; no name is cut."""
    names = {f"part_{'x' * n}.weight" for n in range(120)}
    known: frozenset[str] = frozenset()
    rounds = 0
    while known != names:
        detail = kept_refusal(sorted(names - known)).detail
        assert len(detail) <= 2000
        assert kept_patterns(detail) <= names
        known |= kept_patterns(detail)
        rounds += 1
    assert rounds < 10
