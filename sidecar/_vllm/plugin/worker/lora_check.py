"""Checks whether a LoRA adapter fits the model, before anything is read or loaded.

vLLM itself checks little: it copies a smaller tensor into the corner of a larger buffer, and
accepts one half of an A/B pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._transfer.unloaded import refused
from sidecar._vllm.plugin import agreement

if TYPE_CHECKING:
    from bus._manifest import Manifest, TensorMeta

_SUFFIXES: Final = (".lora_A.weight", ".lora_B.weight")
_DTYPES: Final = frozenset({"float32", "float16", "bfloat16"})
_DIMENSIONS: Final = 2


@dataclass
class _Pair:
    """The A and B tensors of one module; ``rank`` comes from the adapter's config."""

    rank: int
    halves: dict[str, TensorMeta] = field(default_factory=dict)


def peft_helper(config: dict[str, Any], lora_config: Any) -> Any:
    """Makes vLLM's ``PEFTHelper``, which checks and holds a LoRA adapter's config.

    Args:
        config: PEFT's ``adapter_config``.
        lora_config: vLLM's LoRA options.

    Raises:
        EngineError: code ``manifest_refused``: vLLM does not support such an adapter.
    """
    from vllm.lora.peft_helper import PEFTHelper  # noqa: PLC0415 - only in a worker with LoRA

    try:
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(lora_config)
    except (ValueError, TypeError) as error:
        raise EngineError(f"adapter_config: {error}", code=NackCode.MANIFEST_REFUSED) from error
    return helper


def check_adapter(config: dict[str, Any], manifest: Manifest, manager: Any) -> None:
    """Checks that a LoRA adapter fits the model's modules that take LoRA.

    A collective of the engine's workers, because each has a part of the model.

    Args:
        config: PEFT's ``adapter_config``.
        manifest: names, shapes and dtypes of the adapter's tensors.
        manager: vLLM's ``LoRAModelManager``, which has wrapped these modules.

    Raises:
        EngineError: code ``manifest_refused``, with the tensor that is unknown, misshapen, of too
            high a rank, or the half that is missing.
    """
    metas = tuple(manifest.tensors())
    _check_ranks(config, metas, int(manager.lora_config.max_lora_rank))
    helper = peft_helper(config, manager.lora_config)
    places = _locations(manager)
    mapper = weights_mapper(manager.model)
    pairs: dict[str, _Pair] = {}
    known = torch.zeros(len(metas), dtype=torch.uint8)
    for index, meta in enumerate(metas):
        module, suffix = _parsed(meta, mapper)
        pair = pairs.get(module)
        if pair is None:
            pair = pairs[module] = _Pair(helper.get_rank_and_scaling(_parsed(meta, None)[0])[0])
        pair.halves[suffix] = meta
        known[index] = module in places
    known = agreement.any_rank(known)
    for index, meta in enumerate(metas):
        if not known[index]:
            targets = sorted({place.rpartition(".")[2] for place in places})
            raise refused(
                meta.name,
                f"unknown: the module takes no LoRA in this engine; these do: {', '.join(targets)}",
            )
    for module, pair in pairs.items():
        _check_pair(pair, _sizes(manager, places.get(module)))


def weights_mapper(model: Any) -> Any:
    """Returns vLLM's mapper from a checkpoint's tensor names to vLLM's; None without one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _check_ranks(config: dict[str, Any], metas: tuple[TensorMeta, ...], highest: int) -> None:
    """Checks ranks by the tensors' shapes, because the config's rank may be wrong."""
    for meta in metas:
        rank = min(meta.shape, default=0) if len(meta.shape) == _DIMENSIONS else 0
        if meta.name.endswith(_SUFFIXES[0]) and rank:
            rank = meta.shape[0]
        elif meta.name.endswith(_SUFFIXES[1]) and rank:
            rank = meta.shape[1]
        if rank > highest:
            raise refused(
                meta.name,
                f"rank {rank} is over the engine's --max-lora-rank {highest}: start the engine "
                f"with a higher value (the adapter's config says r={config.get('r')})",
            )


def _parsed(meta: TensorMeta, mapper: Any) -> tuple[str, str]:
    """Returns vLLM's name of the module, and the tensor's suffix (A or B)."""
    from vllm.lora.utils import parse_fine_tuned_lora_name  # noqa: PLC0415 - as above

    suffix = next((s for s in _SUFFIXES if meta.name.endswith(s)), None)
    if suffix is None:
        raise refused(
            meta.name, f"unknown: names of adapter tensors end in {' or '.join(_SUFFIXES)}"
        )
    try:
        return parse_fine_tuned_lora_name(meta.name, mapper)[0], suffix
    except ValueError as error:
        raise refused(meta.name, f"unknown: {error}") from error


def _locations(manager: Any) -> dict[str, tuple[str, int]]:
    """Returns the location of each module that may have an adapter.

    A location is the wrapped module, which may be a fused one, and the index of the part in it.
    """
    places: dict[str, tuple[str, int]] = {}
    for wrapped in manager.modules:
        for part, name in enumerate(manager.packed_modules.get(wrapped, [wrapped])):
            places[name] = (wrapped, part)
    return places


def _sizes(manager: Any, place: tuple[str, int] | None) -> tuple[int, int] | None:
    """Returns the input and output size of a whole module.

    Returns None if the module is on another worker, or is not linear, such as experts: vLLM's
    loader checks these.
    """
    if place is None:
        return None
    wrapped, part = place
    layer = getattr(manager.modules[wrapped], "base_layer", None)
    inputs = getattr(layer, "input_size", None)
    if layer is None or not isinstance(inputs, int):
        return None
    if wrapped not in manager.packed_modules:
        return inputs, int(layer.output_size)
    if hasattr(layer, "total_num_kv_heads"):  # output_sizes repeat keys per worker
        heads = layer.total_num_kv_heads if part else layer.total_num_heads
        return inputs, int(heads * layer.head_size)
    outputs = getattr(layer, "output_sizes", None)
    parts = len(manager.packed_modules[wrapped])
    return (inputs, int(outputs[part])) if outputs and len(outputs) == parts else None


def _check_pair(pair: _Pair, sizes: tuple[int, int] | None) -> None:
    for suffix, other in (_SUFFIXES, _SUFFIXES[::-1]):
        if other not in pair.halves:
            meta = pair.halves[suffix]
            raise refused(
                meta.name.removesuffix(suffix) + other,
                f"missing: the other half of {meta.name}'s pair",
            )
    for suffix, meta in pair.halves.items():
        first = suffix == _SUFFIXES[0]
        size = None if sizes is None else sizes[0 if first else 1]
        shape = [pair.rank, size] if first else [size, pair.rank]
        fits = len(meta.shape) == _DIMENSIONS and all(
            wanted in (None, found) for wanted, found in zip(shape, meta.shape, strict=True)
        )
        if not fits:
            fitting = ", ".join("?" if n is None else str(n) for n in shape)
            raise refused(
                meta.name, f"misshapen: shape {list(meta.shape)}, but the model needs [{fitting}]"
            )
        if meta.dtype not in _DTYPES:
            raise refused(
                meta.name,
                f"dtype {meta.dtype} is not supported: use one of {', '.join(sorted(_DTYPES))}",
            )
