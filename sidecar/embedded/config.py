"""The sizes of a model, read from the ``config.json`` of a Hugging Face style folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from bus.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What must have this value for the arithmetic of model.py to be the right one.
_FIXED: Final[dict[str, object]] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
}
_DENSE: Final = "qwen3"
_MOE: Final = "qwen3_moe"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a mixture: ``inner`` is their width, ``layers`` are those that have them.

    Each token goes to ``top_k`` of ``count`` experts; with ``norm_top_k`` their shares
    add up to one.
    """

    count: int
    top_k: int
    inner: int
    norm_top_k: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Qwen3 decoder: lengths in tokens, widths in elements, ``dtype`` by torch's name.

    ``experts`` is None for a dense model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    rms_eps: float
    tied: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    experts: ExpertsConfig | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def read_config(folder: Path, dtype: str = "auto") -> ModelConfig:
    """Read ``folder/config.json``; ``dtype`` other than ``auto`` overrides the file's.

    Raises:
        UsageError: names the file and the field that is missing or not supported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"model={folder}: can't read {path.name}: {error}") from error
    fields = _Fields(path, raw)
    kind = fields.one_of("model_type", (_DENSE, _MOE))
    for name, wanted in _FIXED.items():
        fields.fixed(name, wanted)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.wrong("num_attention_heads", f"{num_heads} over {num_kv_heads} KV heads")
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim"),
        max_positions=fields.integer("max_position_embeddings"),
        rope_theta=fields.rope_theta(),
        rms_eps=fields.number("rms_norm_eps"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=fields.dtype() if dtype == "auto" else _known_dtype(dtype),
        experts=_experts(fields) if kind == _MOE else None,
    )


def _experts(fields: _Fields) -> ExpertsConfig | None:
    """The mixture, or None if no layer has one. Defaults are Hugging Face's."""
    # Newer versions of transformers write the longer name.
    name = fields.first_of("num_experts", "num_local_experts")
    count = fields.integer(name)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > count:
        raise fields.wrong("num_experts_per_tok", f"{top_k} of {count} experts")
    stride = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers")
    layers = tuple(
        index
        for index in range(fields.integer("num_hidden_layers"))
        if index not in dense and (index + 1) % stride == 0
    )
    if not layers:
        return None
    inner = fields.integer("moe_intermediate_size")
    return ExpertsConfig(count, top_k, inner, fields.flag("norm_topk_prob"), layers)


class _Fields:
    """Typed access to the file; every error names file and field."""

    def __init__(self, path: Path, raw: object) -> None:
        if not isinstance(raw, dict):
            raise UsageError(f"{path}: must be a JSON object")
        self._path = path
        self._raw = raw

    def wrong(self, name: str, value: object) -> UsageError:
        return UsageError(f"{self._path}: {name}: {value} is not supported by the embedded engine")

    def fixed(self, name: str, wanted: object) -> None:
        value = self._raw.get(name, wanted)
        if value != wanted:
            raise self.wrong(name, f"{value!r} (only {wanted!r})")

    def one_of(self, name: str, known: tuple[str, ...]) -> str:
        """The first of ``entry`` where the file has none."""
        value = self._raw.get(name, known[0])
        if value not in known:
            raise self.wrong(name, f"{value!r} (only {' and '.join(map(repr, known))})")
        return str(value)

    def first_of(self, name: str, other: str) -> str:
        """``other`` where the file has that one alone."""
        return other if name not in self._raw and other in self._raw else name

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name, default)
        if not isinstance(value, int) or value < 1:
            raise self.wrong(name, repr(value))
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._raw.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.wrong(name, repr(value))
        return tuple(value)

    def flag(self, name: str) -> bool:
        value = self._raw.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, repr(value))
        return value

    def number(self, name: str) -> float:
        value = self._raw.get(name)
        if not isinstance(value, int | float):
            raise self.wrong(name, repr(value))
        return float(value)

    def rope_theta(self) -> float:
        """The base of the rotary positions, which newer files keep in ``rope_parameters``."""
        rope = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise self.wrong("rope_parameters", f"rope_type {kind!r}")
        if "rope_theta" in rope:
            return float(rope["rope_theta"])
        return self.number("rope_theta")

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._raw.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) for i in ids):
            raise self.wrong(name, repr(value))
        return tuple(ids)

    def dtype(self) -> str:
        value = self._raw.get("dtype") or self._raw.get("torch_dtype") or "float32"
        if value not in DTYPES:
            raise self.wrong("dtype", repr(value))
        return str(value)


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: choose one of auto, {', '.join(DTYPES)}")
    return dtype
