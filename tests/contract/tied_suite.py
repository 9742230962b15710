"""What an engine does with tensors that have no parameter of their own: none is lost in silence.

The engine under test ties its output head to the embeddings, and computes its rotary frequencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import ManifestRefused
from examples.own_backend import register as register_own_backend
from tests.contract.bus_suite import whole_bus
from tests.contract.engine_suite import PROMPT, EngineUnderTest, contract

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_agent._options import How

HEAD = "lm_head.weight"
EMBEDDINGS = "model.embed_tokens.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"
HEAD_DIM, THETA = 32, 10_000.0
OWN = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)


async def serves(under_test: EngineUnderTest, weights: dict[str, Tensor]) -> None:
    fresh = await under_test.generate(PROMPT, 16)
    assert fresh.tokens == under_test.reference(weights, PROMPT, 16)


class TiedContract:
    """The suite. A subclass, or its module, has a fixture ``under_test``."""

    @pytest.mark.parametrize("how", ["staged", "paused"])
    @pytest.mark.parametrize("backend", ["shm", "gloo", "files"])
    @contract
    async def test_a_head_of_its_own_is_refused_and_an_equal_one_is_not(
        self, under_test: EngineUnderTest, backend: str, how: How
    ) -> None:
        """Whichever of the two comes first, in one chunk or in two, and unverified."""
        register_own_backend()
        weights = under_test.other_weights(71)
        version = under_test.version
        for first, chunk_bytes in ((True, 1 << 26), (False, 20_000), (True, 20_000)):
            head = weights[EMBEDDINGS] + 0.0
            head[5, 7] += 0.001
            apart = {HEAD: head, **weights} if first else {**weights, HEAD: head}
            equal = {**apart, HEAD: weights[EMBEDDINGS].clone()}
            options = {"backend": backend, "chunk_bytes": chunk_bytes, "verify": "off"}
            async with whole_bus(under_test, **options) as bus:
                with pytest.raises(ManifestRefused, match=f"{HEAD}: is not equal to") as refused:
                    await bus.agent.update_weights(apart, how=how)
                assert refused.value.nack.tensor == HEAD
                if how == "staged":
                    await serves(under_test, dict(under_test.weights))
                version = await bus.agent.update_weights(
                    equal, how=how if how == "staged" else "auto"
                )
                under_test.version, under_test.weights = version, weights
                await serves(under_test, weights)

    @pytest.mark.parametrize("how", ["staged", "paused"])
    @contract
    async def test_frequencies_that_the_engine_does_not_use_are_refused(
        self, under_test: EngineUnderTest, how: How
    ) -> None:
        """Old checkpoints have them; those of the same model are taken."""
        weights = under_test.other_weights(72)
        async with whole_bus(under_test) as bus:
            with pytest.raises(
                ManifestRefused, match="differs from the values that this engine computes"
            ) as refused:
                await bus.agent.update_weights({FREQUENCIES: OWN / 4, **weights}, how=how)
            assert refused.value.nack.tensor == FREQUENCIES
            await serves(under_test, dict(under_test.weights))
            version = await bus.agent.update_weights({FREQUENCIES: OWN, **weights}, how=how)
            under_test.version, under_test.weights = version, weights
            await serves(under_test, weights)
