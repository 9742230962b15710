"""From Hugging Face tensor names to the model's parameters, and the manifest check.

The model keeps q, k and v of a layer in one parameter, and gate and up in another,
as vLLM does. A tensor that arrives under its Hugging Face name is therefore often
a part of a parameter: a range of its rows.

Where experts are spread over ranks, a rank has the parameters of its own alone. An
update is checked in whole on every rank all the same, so that all ranks say the same
of it, and what belongs to another rank's experts is then let pass.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from bus.errors import EngineError, UsageError
from bus.manifest import Manifest, TensorMeta
from bus.messages import NackCode
from sidecar.engine import FUSED_HINT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from sidecar.embedded.config import ExpertsConfig, ModelConfig

# Computed from the configuration, yet found in some checkpoints: taken and ignored.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
_TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """Where a tensor goes: rows ``row`` to ``row + shape[0]`` of ``parameter``."""

    parameter: str
    row: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Every parameter's shape, and every tensor's place in them.

    ``optional`` are tensors that may be sent and are not loaded: with tied
    embeddings the output layer is the embedding. ``elsewhere`` are the parameters
    that other ranks hold.
    """

    dtype: str
    parameters: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, Part]
    optional: Mapping[str, tuple[int, ...]]
    elsewhere: frozenset[str] = frozenset()

    @property
    def here(self) -> dict[str, tuple[int, ...]]:
        """The parameters of this rank."""
        return {n: shape for n, shape in self.parameters.items() if n not in self.elsewhere}

    def loads(self, name: str) -> bool:
        """Whether the tensor goes into a parameter of this rank."""
        return not self.ignored(name) and self.parts[name].parameter not in self.elsewhere

    def ignored(self, name: str) -> bool:
        return name in self.optional or name.endswith(_DERIVED_SUFFIX)


def layout_of(config: ModelConfig, own_experts: range | None = None) -> ParameterLayout:
    """The layout of the decoder in :mod:`sidecar.embedded.model`.

    ``own_experts`` are those of this rank; None: all.
    """
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    vocab = (config.vocab_size, hidden)
    parameters: dict[str, tuple[int, ...]] = {}
    parts: dict[str, Part] = {}
    elsewhere: set[str] = set()

    def whole(name: str, shape: tuple[int, ...]) -> str:
        parameters[name] = shape
        parts[name] = Part(name, 0, shape)
        return name

    def fused(prefix: str, parameter: str, rows: dict[str, int]) -> str:
        fused_name, row = f"{prefix}.{parameter}.weight", 0
        for projection, count in rows.items():
            name = f"{prefix}.{projection}.weight"
            parts[name] = Part(fused_name, row, (count, hidden))
            row += count
        parameters[fused_name] = (row, hidden)
        return fused_name

    def feed_forward(prefix: str, inner: int) -> tuple[str, str]:
        gate_up = fused(prefix, "gate_up_proj", {"gate_proj": inner, "up_proj": inner})
        return gate_up, whole(f"{prefix}.down_proj.weight", (hidden, inner))

    def mixture(prefix: str, experts: ExpertsConfig) -> None:
        whole(f"{prefix}.gate.weight", (experts.count, hidden))
        for expert in range(experts.count):
            made = feed_forward(f"{prefix}.experts.{expert}", experts.inner)
            if own_experts is not None and expert not in own_experts:
                elsewhere.update(made)

    whole("model.embed_tokens.weight", vocab)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        whole(f"{layer}.input_layernorm.weight", (hidden,))
        fused(f"{layer}.self_attn", "qkv_proj", {"q_proj": query, "k_proj": kv, "v_proj": kv})
        whole(f"{layer}.self_attn.q_norm.weight", (dim,))
        whole(f"{layer}.self_attn.k_norm.weight", (dim,))
        whole(f"{layer}.self_attn.o_proj.weight", (hidden, query))
        whole(f"{layer}.post_attention_layernorm.weight", (hidden,))
        if config.experts is not None and index in config.experts.layers:
            mixture(f"{layer}.mlp", config.experts)
        else:
            feed_forward(f"{layer}.mlp", config.intermediate_size)
    whole("model.norm.weight", (hidden,))
    if not config.tied:
        whole(_TIED_HEAD, vocab)
    optional = {_TIED_HEAD: vocab} if config.tied else {}
    return ParameterLayout(config.dtype, parameters, parts, optional, frozenset(elsewhere))


def check_manifest(layout: ParameterLayout, manifest: Manifest) -> None:
    """Check that ``manifest`` is one whole update of the model; load nothing.

    First every tensor by itself, then the elements that each parameter would get.

    Raises:
        EngineError: code ``manifest_refused``, with the tensor at fault.
    """
    filled: Counter[str] = Counter()
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        part = layout.parts.get(name)
        if part is None or shape != part.shape or dtype != layout.dtype:
            _check_tensor(layout, TensorMeta(name, dtype, shape))  # ignored, or refused
        else:
            filled[part.parameter] += math.prod(shape)
    sent = frozenset(manifest.names)
    for parameter, shape in layout.parameters.items():
        if filled[parameter] != math.prod(shape):
            raise _incomplete(layout, parameter, filled[parameter], sent)


def load_tensors(
    layout: ParameterLayout,
    parameters: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Copy tensors, in the shapes of ``layout``, into their places in ``parameters``.

    Those of other ranks are left out.
    """
    with torch.inference_mode():
        for name, tensor in tensors:
            if layout.loads(name):
                part = layout.parts[name]
                parameters[part.parameter].narrow(0, part.row, part.shape[0]).copy_(tensor)


def load_folder(
    layout: ParameterLayout, parameters: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Fill ``parameters`` from the ``*.safetensors`` files of ``folder``, whatever their dtype.

    Raises:
        UsageError: the folder has no such file, or they don't hold this model.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"model={folder}: no *.safetensors in it")
    metas: list[TensorMeta] = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping: it has no iterator
                shape = tuple(tensors.get_slice(name).get_shape())
                metas.append(TensorMeta(name, layout.dtype, shape))
    try:
        check_manifest(layout, Manifest.plan(metas, chunk_bytes=1))
    except (EngineError, ValueError) as error:
        raise UsageError(f"model={folder}: {error}") from error
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if layout.loads(name)]  # noqa: SIM118 - same
            load_tensors(layout, parameters, ((name, tensors.get_tensor(name)) for name in names))


def _check_tensor(layout: ParameterLayout, meta: TensorMeta) -> None:
    if meta.name.endswith(_DERIVED_SUFFIX):
        return
    part = layout.parts.get(meta.name)
    shape = part.shape if part else layout.optional.get(meta.name)
    if shape is None:
        hint = ""
        if meta.name in layout.parameters:
            sources = ", ".join(n for n, p in layout.parts.items() if p.parameter == meta.name)
            hint = f" (send its parts: {sources})"
        elif ".experts." in meta.name:
            hint = f"; {FUSED_HINT}"
        raise _refused(meta.name, f"the model has no tensor {meta.name}{hint}")
    if meta.shape != shape:
        raise _refused(meta.name, f"{meta.name} has shape {meta.shape}, the model needs {shape}")
    if meta.dtype != layout.dtype:
        raise _refused(
            meta.name,
            f"{meta.name} has dtype {meta.dtype}, the model's is {layout.dtype}: "
            'update_weights(..., dtype="engine") casts it in the trainer',
        )


def _incomplete(
    layout: ParameterLayout, parameter: str, elements: int, sent: frozenset[str]
) -> EngineError:
    parts = [name for name, part in layout.parts.items() if part.parameter == parameter]
    missing = [name for name in parts if name not in sent]
    if len(parts) == 1:
        return _refused(parameter, f"{parameter} is missing: an update covers every parameter")
    total = math.prod(layout.parameters[parameter])
    return _refused(
        missing[0],
        f"{parameter} would get {elements} of its {total} elements: "
        f"missing {', '.join(missing)} of its parts {', '.join(parts)}",
    )


def _refused(tensor: str, detail: str) -> EngineError:
    return EngineError(detail, code=NackCode.MANIFEST_REFUSED, tensor=tensor)
