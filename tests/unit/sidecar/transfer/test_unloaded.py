"""Tensors that are sent and have no parameter: they equal what the engine has instead."""

from __future__ import annotations

import pytest
import torch

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.transfer.unloaded import UnloadedTensors

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"
OWN = 10_000.0 ** -(torch.arange(0, 32, 2) / 32)


def tied(own: torch.Tensor | None = OWN) -> UnloadedTensors:
    return UnloadedTensors(HEAD, lambda _name: own)


def embeddings() -> torch.Tensor:
    return torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("order", [(HEAD, EMBEDDINGS), (EMBEDDINGS, HEAD)])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("place", [(0, 0), (299, 63), (150, 3)])
def test_one_element_that_differs_is_found(
    order: tuple[str, str], chunks: int, place: tuple[int, int]
) -> None:
    unloaded = tied()
    unloaded.begin(order)
    sent = {EMBEDDINGS: embeddings(), HEAD: embeddings()}
    sent[HEAD][place] *= 1.01
    pairs = [(name, sent[name]) for name in order]
    if chunks == 2:
        unloaded.check(pairs[:1])
    with pytest.raises(EngineError, match="is not equal to") as refused:
        unloaded.check(pairs[chunks - 1 :])
    assert (refused.value.code, refused.value.tensor) == (NackCode.MANIFEST_REFUSED, HEAD)


def test_an_equal_head_passes_and_the_next_update_begins_anew() -> None:
    unloaded = tied()
    for factor in (1, 2):
        unloaded.begin((HEAD, EMBEDDINGS))
        unloaded.check([(HEAD, embeddings() * factor)])
        unloaded.check([(EMBEDDINGS, embeddings() * factor)])


def test_an_untied_head_is_not_looked_at() -> None:
    unloaded = UnloadedTensors("", lambda _name: None)
    unloaded.begin((HEAD, EMBEDDINGS))
    unloaded.check([(HEAD, embeddings()), (EMBEDDINGS, embeddings() * 2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_compared_as_far_as_they_are_precise(dtype: torch.dtype) -> None:
    """Of either side."""
    for sent, own in ((OWN.to(dtype), OWN), (OWN, OWN.to(dtype)), (OWN * (1 + 1e-7), OWN)):
        tied(own).check([(FREQUENCIES, sent)])
    with pytest.raises(EngineError, match="is not what this engine computes"):
        tied(OWN.to(dtype)).check([(FREQUENCIES, OWN / 4)])
    with pytest.raises(EngineError, match="is not what this engine computes"):
        tied().check([(FREQUENCIES, OWN[:-1])])


def test_frequencies_that_can_not_be_compared_are_to_be_left_out() -> None:
    with pytest.raises(EngineError, match="leave it out") as refused:
        tied(None).check([(FREQUENCIES, OWN)])
    assert refused.value.tensor == FREQUENCIES
