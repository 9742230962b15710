"""A model of transformers in the form of its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.saved_form import saved_form
from trainer_agent._weights.source import meta_of

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "Mixtral": {"num_local_experts": 4, "tie_word_embeddings": True},
    "Glm4Moe": {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "Qwen3": {"head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_save_pretrained_writes_without_a_copy(tmp_path: Path, family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    for source in (as_source(model), saved_form(dict(as_state(model)), config)):
        assert source is not None
        sent = dict(source)
        assert [meta_of(*pair) for pair in sent.items()] == list(source.metadata())
        assert sent.keys() == written.keys()
        assert all(torch.equal(sent[name], written[name]) for name in written)
        assert {tensor.untyped_storage().data_ptr() for tensor in sent.values()} <= own


def as_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its state dict, without the head that is tied to the embeddings."""
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: each for name, each in model.state_dict().items() if name in names}
