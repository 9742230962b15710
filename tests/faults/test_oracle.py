"""The oracle tells tokens of one version's weights from all others, with and without the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import Checkpoint, Past, certain_experts, perturbed
from tests.support.oracle import Span, foreign_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

PROMPT = (5, 9, 77, 31, 12)
HALF, ALL = 12, 24
SPANS = [Span(1, 0, HALF), Span(2, HALF, ALL)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return certain_experts(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def versions(checkpoint: Checkpoint) -> dict[int, Mapping[str, Tensor]]:
    return {1: checkpoint.weights, 2: perturbed(checkpoint.weights, 5)}


def generate(
    checkpoint: Checkpoint,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    *,
    clear: bool,
) -> list[int]:
    """One token after the other; the weights change in the middle."""
    tokens: list[int] = []
    past: Past | None = None
    fresh = [*PROMPT]
    for place in range(ALL):
        if place == HALF and clear:
            past, fresh = None, [*PROMPT, *tokens]
        logits, past = checkpoint.forward(first if place < HALF else second, fresh, past)
        fresh = [int(logits.argmax())]
        tokens += fresh
    return tokens


def foreign(
    checkpoint: Checkpoint,
    versions: Mapping[int, Mapping[str, Tensor]],
    tokens: list[int],
    *,
    clear: bool,
) -> list[int]:
    return foreign_tokens(
        checkpoint,
        versions.__getitem__,
        PROMPT,
        tokens,
        SPANS,
        clear_cache=lambda _: clear,
    )


@pytest.mark.parametrize("clear", [True, False])
def test_an_update_in_the_middle_is_clean(
    checkpoint: Checkpoint, versions: dict[int, Mapping[str, Tensor]], clear: bool
) -> None:
    """Over new keys and values, or the old ones; and each is told from the other."""
    tokens = generate(checkpoint, versions[1], versions[2], clear=clear)
    assert foreign(checkpoint, versions, tokens, clear=clear) == []
    assert foreign(checkpoint, versions, tokens, clear=not clear)


@pytest.mark.parametrize("kept", ["model.layers.0", "model.layers.1.self_attn", "lm_head"])
def test_a_part_of_the_old_weights_is_seen(
    checkpoint: Checkpoint, versions: dict[int, Mapping[str, Tensor]], kept: str
) -> None:
    """Whichever tensors an engine has failed to take: some token tells."""
    mixed = {name: versions[1 if name.startswith(kept) else 2][name] for name in checkpoint.weights}
    tokens = generate(checkpoint, versions[1], mixed, clear=True)
    wrong = foreign(checkpoint, versions, tokens, clear=True)
    assert wrong
    assert min(wrong) >= HALF
