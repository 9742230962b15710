"""The manifest check and the loader: nothing that doesn't fit gets near the model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus._manifest import Manifest, TensorMeta
from bus.errors import EngineError, UsageError
from bus.messages import NackCode
from sidecar._embedded.config import read_config
from sidecar._embedded.model import ModelRunner
from sidecar._embedded.qwen3 import Qwen3
from sidecar._embedded.weights import ExpectedWeights, load_folder, load_tensors
from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.push import metas_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.1.mlp"


@pytest.fixture
def expected(checkpoint: Checkpoint) -> ExpectedWeights:
    return ExpectedWeights.of(Qwen3(read_config(checkpoint.folder)))


def _check(expected: ExpectedWeights, metas: Iterable[TensorMeta]) -> None:
    expected.check(Manifest.plan(metas, chunk_bytes=1 << 20))


def _without(checkpoint: Checkpoint, *names: str) -> list[TensorMeta]:
    metas = [meta for meta in metas_of(checkpoint.weights) if meta.name not in names]
    assert len(metas) == len(checkpoint.weights) - len(names)
    return metas


def _changed(checkpoint: Checkpoint, name: str, **change: Any) -> list[TensorMeta]:
    return [
        replace(meta, **change) if meta.name == name else meta
        for meta in metas_of(checkpoint.weights)
    ]


def _refusal(expected: ExpectedWeights, metas: Iterable[TensorMeta]) -> EngineError:
    with pytest.raises(EngineError) as refused:
        _check(expected, metas)
    assert refused.value.code is NackCode.MANIFEST_REFUSED
    return refused.value


def test_a_whole_manifest_in_any_order_is_accepted(
    checkpoint: Checkpoint, expected: ExpectedWeights
) -> None:
    """Order and chunks are the trainer's business."""
    _check(expected, metas_of(checkpoint.weights))
    _check(expected, reversed(metas_of(checkpoint.weights)))


def test_an_unknown_tensor_is_named(checkpoint: Checkpoint, expected: ExpectedWeights) -> None:
    """Even when everything that is needed is there, too."""
    extra = TensorMeta("model.layers.2.mlp.up_proj.weight", "float32", (128, 64))
    error = _refusal(expected, [*metas_of(checkpoint.weights), extra])
    assert error.tensor == extra.name
    assert "the model has no such tensor" in error.detail


def test_a_fused_name_is_refused(checkpoint: Checkpoint, expected: ExpectedWeights) -> None:
    """Trainers name tensors as Hugging Face does, not as vLLM keeps them."""
    fused = TensorMeta(f"{MLP}.gate_up_proj.weight", "float32", (256, 64))
    parts = (f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight")
    assert _refusal(expected, [*_without(checkpoint, *parts), fused]).tensor == fused.name


def test_a_missing_tensor_is_named(checkpoint: Checkpoint, expected: ExpectedWeights) -> None:
    """An update covers the whole model."""
    name = f"{MLP}.down_proj.weight"
    error = _refusal(expected, _without(checkpoint, name))
    assert error.tensor == name
    assert "missing" in error.detail


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": (64, 32)}, "has shape (64, 32), but the model needs (64, 64)"),
        ({"shape": (4096,)}, "has shape (4096,), but the model needs (64, 64)"),
        ({"dtype": "bfloat16"}, "has dtype bfloat16, but the model's is float32"),
    ],
)
def test_another_shape_or_dtype_is_refused(
    checkpoint: Checkpoint, expected: ExpectedWeights, change: dict[str, Any], said: str
) -> None:
    """As many elements in another shape are not the same tensor."""
    name = f"{ATTENTION}.o_proj.weight"
    error = _refusal(expected, _changed(checkpoint, name, **change))
    assert error.tensor == name
    assert said in error.detail


def test_rotary_frequencies_are_taken_and_ignored(
    checkpoint: Checkpoint, expected: ExpectedWeights
) -> None:
    """Old checkpoints hold them; the engine computes them."""
    buffer = TensorMeta(f"{ATTENTION}.rotary_emb.inv_freq", "float32", (16,))
    _check(expected, [*metas_of(checkpoint.weights), buffer])
    load_tensors({}, [(buffer.name, torch.zeros(16))])


def test_a_tied_head_may_be_sent_or_left_out(tmp_path: Path) -> None:
    """It is the embedding; still it must have the embedding's shape."""
    tied = make_checkpoint(tmp_path, seed=1, tie=True)
    expected = ExpectedWeights.of(Qwen3(read_config(tmp_path)))
    head = TensorMeta("lm_head.weight", "float32", (128, 64))
    _check(expected, metas_of(tied.weights))
    _check(expected, [*metas_of(tied.weights), head])
    error = _refusal(expected, [*metas_of(tied.weights), replace(head, shape=(128, 32))])
    assert error.tensor == "lm_head.weight"


def test_an_untied_head_is_needed(checkpoint: Checkpoint, expected: ExpectedWeights) -> None:
    """Without tied embeddings it is a parameter like any other."""
    assert _refusal(expected, _without(checkpoint, "lm_head.weight")).tensor == "lm_head.weight"


def test_every_tensor_is_loaded(checkpoint: Checkpoint) -> None:
    """Each under its own name."""
    model = _load(checkpoint.folder)
    assert model.parameters.keys() == checkpoint.weights.keys()
    for name, weight in checkpoint.weights.items():
        assert torch.equal(model.parameters[name], weight)


def _load(folder: Path) -> ModelRunner:
    model = ModelRunner(read_config(folder), slots=1, max_len=8)
    load_folder(model.expected, model.parameters, folder)
    return model


def _drop_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _set(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_drop_file, "no \\*.safetensors"),
        (_drop_config, "can't read config.json"),
        (_set(model_type="llama"), "model_type: 'llama'"),
        (_set(hidden_act="gelu"), "hidden_act: 'gelu'"),
        (_set(hidden_size="64"), r"Expected `int`, got `str` - at `\$.hidden_size`"),
        (_set(num_key_value_heads=3), "num_attention_heads: 2 heads over 3"),
        (_set(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn'"),
        (_set(dtype="float16"), r"'float16' - at `\$.dtype`"),
        (_set(eos_token_id="end"), r"got `str` - at `\$.eos_token_id`"),
        (_set(num_hidden_layers=3), "model.layers.2.input_layernorm.weight: is missing"),
        (_set(hidden_size=32), "has shape"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    """What is wrong, and in which file or field."""
    make_checkpoint(tmp_path, seed=1)
    spoil(tmp_path)
    with pytest.raises(UsageError, match=said):
        _load(tmp_path)
