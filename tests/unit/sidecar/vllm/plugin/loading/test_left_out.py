"""What vLLM has left out of a model is named, with what a trainer is to leave out."""

from __future__ import annotations

import pytest
from torch import nn

from sidecar._vllm.plugin.loading.left_out import left_out_refusal

NAMES = (
    "model.visual.a.weight",
    "model.visual.b.weight",
    "model.language_model.norm.weight",
    "model.projector.weight",
)


class StageMissingLayer(nn.Module):
    """As vLLM's, by its name."""

    stage_name = "vision_tower"


class Mapper:
    """As vLLM's, for one prefix."""

    def _map_name(self, name: str) -> str | None:
        return None if name.endswith("dropped") else name.removeprefix("model.")


class Model(nn.Module):
    """A vision-language model for text alone."""

    hf_to_vllm_mapper: Mapper | None = Mapper()

    def __init__(self) -> None:
        super().__init__()
        self.visual = StageMissingLayer()
        self.projector = StageMissingLayer()
        self.language_model = nn.LayerNorm(2)


@pytest.mark.parametrize("name", [NAMES[0], NAMES[3]])
def test_a_tower_that_is_not_there_is_named_by_the_trainers_names(name: str) -> None:
    """One refusal says all that is to be left out, whichever tensor it concerns."""
    error = left_out_refusal(Model(), name, NAMES)
    assert error is not None
    assert error.tensor == name
    assert "without its vision_tower, as with --limit-mm-per-prompt of 0" in error.detail
    assert (
        "leave out the 3 tensors whose names begin with model.visual. or model.projector., or"
    ) in error.detail


@pytest.mark.parametrize("name", [NAMES[2], "model.visually", "model.visual.dropped"])
def test_others_are_not(name: str) -> None:
    assert left_out_refusal(Model(), name, NAMES) is None


def test_names_that_are_not_mapped() -> None:
    model = Model()
    model.hf_to_vllm_mapper = None
    error = left_out_refusal(model, "visual.a.weight", ["visual.a.weight"])
    assert error is not None
    assert "leave out the 1 tensors whose names begin with visual." in error.detail
