"""Reads a Qwen3 model's ``config.json``, as Hugging Face's libraries write it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bus.errors import UsageError
from sidecar._embedded.qwen3 import Qwen3Config

if TYPE_CHECKING:
    from pathlib import Path

_DTYPES: Final = ("float32", "bfloat16")
_MOE: Final = "qwen3_moe"
# The values for which the arithmetic of qwen3.py is right; the first one is the default.
_SUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "model_type": ("qwen3", _MOE),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
}
_MIXTURE: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# Names of other releases of transformers, and the names used here.
_OTHER_NAMES: Final = {"num_local_experts": "num_experts", "torch_dtype": "dtype"}


def read_config(folder: Path, dtype: str = "auto") -> Qwen3Config:
    """Reads the sizes of a network from a checkpoint's ``config.json``.

    Args:
        dtype: the dtype to use for the parameters; ``auto`` takes the file's.

    Raises:
        UsageError: a field is missing or not supported. The text names the file and the field.
    """
    path = folder / "config.json"
    if dtype not in ("auto", *_DTYPES):
        raise UsageError(f"dtype={dtype!r}: choose one of auto, {', '.join(_DTYPES)}")
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"model={folder}: can't read {path.name}: {error}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path} must contain a JSON object")

    def unsupported(field: str, detail: str) -> UsageError:
        return UsageError(f"{path}: {field}: {detail} is not supported by the embedded engine")

    for field, values in _SUPPORTED.items():
        value = raw.get(field, values[0])
        if value not in values:
            raise unsupported(field, f"{value!r} (only {' and '.join(map(repr, values))})")
    given = _normalized(raw)
    if given["rope_type"] != "default":
        raise unsupported("rope_parameters", f"rope_type {given['rope_type']!r}")
    if dtype != "auto":
        given["dtype"] = dtype
    try:
        config = msgspec.convert(given, Qwen3Config)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from error
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % kv_heads:
        raise unsupported("num_attention_heads", f"{heads} heads over {kv_heads} KV heads")
    if config.experts and config.experts_per_token > config.experts:
        chosen = f"{config.experts_per_token} of {config.experts} experts"
        raise unsupported("num_experts_per_tok", chosen)
    return config


def _normalized(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the file's fields under one name each, without null and inapplicable fields."""
    given = {name: value for name, value in raw.items() if value is not None}
    for other, name in _OTHER_NAMES.items():
        if other in given:
            given.setdefault(name, given[other])
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    given["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if "rope_theta" in rope:
        given["rope_theta"] = rope["rope_theta"]
    # A mixture needs all of these, and a dense model has none.
    given |= {name: given.get(name) for name in _MIXTURE}
    if given.get("model_type") != _MOE:
        given = {name: value for name, value in given.items() if name not in _MIXTURE}
    return given
