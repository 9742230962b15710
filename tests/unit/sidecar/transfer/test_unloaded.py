"""Tensors that are sent and have no parameter: they equal what the engine has instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._transfer.unloaded import CheckedLoading, UnloadedTensors

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def test_a_head_that_comes_in_a_later_part_is_compared() -> None:
    """When the embeddings came, it was unknown that the head would."""
    unloaded = tied()
    for factor in (1, 2):
        unloaded.begin((EMBEDDINGS,), is_open=True)
        unloaded.check([(EMBEDDINGS, embeddings())])
        if factor == 1:
            unloaded.check([(HEAD, embeddings())])
    with pytest.raises(EngineError, match="is not equal to"):
        unloaded.check([(HEAD, embeddings() * 2)])


def test_an_untied_head_is_not_looked_at() -> None:
    unloaded = UnloadedTensors("", lambda _name: None)
    unloaded.begin((HEAD, EMBEDDINGS))
    unloaded.check([(HEAD, embeddings()), (EMBEDDINGS, embeddings() * 2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_compared_as_far_as_they_are_precise(dtype: torch.dtype) -> None:
    """Of either side."""
    for sent, own in ((OWN.to(dtype), OWN), (OWN, OWN.to(dtype)), (OWN * (1 + 1e-7), OWN)):
        tied(own).check([(FREQUENCIES, sent)])
    with pytest.raises(EngineError, match="differs from the values that this engine computes"):
        tied(OWN.to(dtype)).check([(FREQUENCIES, OWN / 4)])
    with pytest.raises(EngineError, match="differs from the values that this engine computes"):
        tied().check([(FREQUENCIES, OWN[:-1])])


def test_frequencies_that_can_not_be_compared_are_to_be_left_out() -> None:
    with pytest.raises(EngineError, match="leave the tensor out") as refused:
        tied(None).check([(FREQUENCIES, OWN)])
    assert refused.value.tensor == FREQUENCIES


NORM = "model.norm.weight"


class Loaded:
    """A loader, and what it was given."""

    def __init__(self, *order: str) -> None:
        self.names: list[str] = []
        self.unloaded = tied()
        self.unloaded.begin(order)
        self.checked = CheckedLoading(self.unloaded)
        self.checked.loader = self.take
        self.fails_at = ""  # the name of a tensor

    def take(self, received: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        taken = []
        for name, _ in received:
            if name == self.fails_at:
                raise ValueError(f"no room for {name}")
            taken.append(name)
            self.names.append(name)
        return set(taken)


@pytest.mark.parametrize("order", [(HEAD, EMBEDDINGS, NORM), (NORM, EMBEDDINGS, HEAD)])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_an_equal_head_is_received_and_not_loaded(order: tuple[str, ...], is_lazy: bool) -> None:
    loaded = Loaded(*order)
    pairs = [(name, embeddings()) for name in order]
    loaded.checked.load(iter(pairs) if is_lazy else pairs)
    loaded.checked.require_checked(order)
    loaded.checked.require_loaded()
    assert loaded.names == [name for name in order if name != HEAD]


@pytest.mark.parametrize("order", [(HEAD, EMBEDDINGS, NORM), (NORM, EMBEDDINGS, HEAD)])
def test_of_a_list_with_another_head_nothing_is_loaded(order: tuple[str, ...]) -> None:
    loaded = Loaded(*order)
    sent = {name: embeddings() for name in order} | {HEAD: embeddings() * 2}
    loaded.checked.load([(name, sent[name]) for name in order])
    loaded.checked.load([("model.layers.0.mlp.up_proj.weight", embeddings())])  # is received still
    assert loaded.names == []
    with pytest.raises(EngineError, match="is not equal to"):
        loaded.checked.require_loaded()


def test_what_is_received_lazily_is_received_to_the_end() -> None:
    """A worker that left the transfer half-way would leave the trainer in it."""
    loaded = Loaded(EMBEDDINGS, HEAD, NORM)
    sent = {EMBEDDINGS: embeddings(), HEAD: embeddings() * 2, NORM: embeddings()}
    left = iter(sent.items())
    loaded.checked.load(left)
    assert (next(left, None), loaded.names) == (None, [EMBEDDINGS])
    with pytest.raises(EngineError, match="is not equal to"):
        loaded.checked.require_loaded()


def test_one_tensor_at_a_time_loads_no_empty_list() -> None:
    loaded = Loaded(EMBEDDINGS, HEAD)
    assert loaded.checked.load([(EMBEDDINGS, embeddings())]) == {EMBEDDINGS}
    assert loaded.checked.load([(HEAD, embeddings())]) == set()
    loaded.checked.require_loaded()


@pytest.mark.parametrize("came", [(), (HEAD,), (EMBEDDINGS,)])
def test_a_transport_that_loads_past_the_check_is_refused_once(came: tuple[str, ...]) -> None:
    loaded = Loaded(HEAD, EMBEDDINGS)
    for name in came:
        loaded.checked.load([(name, embeddings())])
    loaded.checked.require_checked((*came, NORM))
    loaded.checked.require_loaded()
    loaded.checked.require_checked((HEAD, EMBEDDINGS))
    with pytest.raises(EngineError, match="could not be compared"):
        loaded.checked.require_loaded()
    loaded.checked.require_loaded()  # what mends the engine finishes as well


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_tensor_that_can_not_be_loaded_ends_the_loading_and_not_the_receiving(
    is_lazy: bool,
) -> None:
    """Who left there would leave the trainer in its broadcast."""
    loaded = Loaded(EMBEDDINGS, NORM)
    loaded.fails_at = NORM
    pairs = [(name, embeddings()) for name in (EMBEDDINGS, NORM, "a", "b")]
    if is_lazy:
        left = iter(pairs)
        loaded.checked.load(left)
        assert next(left, None) is None
    else:
        for pair in pairs:
            loaded.checked.load([pair])
    assert loaded.names == [EMBEDDINGS]
    with pytest.raises(ValueError, match=f"no room for {NORM}"):
        loaded.checked.require_loaded()
    loaded.checked.require_loaded()
