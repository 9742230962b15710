"""Reads models of transformers with the names and shapes that their checkpoints have.

transformers 5 keeps some weights in another form than checkpoints do: the experts of a layer are
one tensor in memory, and one tensor per expert and projection in a file. Engines load checkpoints.
So a model is sent as ``save_pretrained`` would write it, with transformers' own reverse mapping,
as views where no copy is needed. transformers is imported only if a configuration is given.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from bus.errors import UsageError
from trainer_agent._weights.source import PairSource, meta_of, require_sendable
from trainer_agent._weights.wrappers import plain_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bus._manifest import TensorMeta


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tensors in memory (``inputs``), and the checkpoint tensors that they become (``outputs``)."""

    inputs: tuple[str, ...]
    outputs: tuple[TensorMeta, ...]
    is_renamed_only: bool


class SavedForm:
    """Yields a model's tensors with the names and shapes that its checkpoint has.

    A sharded tensor is gathered just before the tensors made of it are yielded.

    Args:
        model: a transformers model, maybe on the meta device; it maps its names to a checkpoint's.
        tensors: the model's parameters and buffers, by their names in memory.

    Raises:
        UsageError: transformers can't revert its own mapping for these tensors.
    """

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            require_sendable(name, tensor)
        self._model = model
        self._tensors = tensors
        metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
        known, pieces = _plans.get(model, ((), ()))
        if known != metas:
            pieces = _plan(model, metas)
            _plans[model] = metas, pieces
        self._pieces = pieces

    def metadata(self) -> list[TensorMeta]:
        """Returns the metadata of the checkpoint's tensors, in the order of iteration."""
        return [meta for piece in self._pieces for meta in piece.outputs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        gathered = iter(PairSource({n: self._tensors[n] for p in self._pieces for n in p.inputs}))
        for piece in self._pieces:
            found = {name: next(gathered)[1].detach() for name in piece.inputs}
            if piece.is_renamed_only:
                yield piece.outputs[0].name, found[piece.inputs[0]]
                continue
            with _Views():
                saved = _revert(self._model, found)
            del found
            for meta in piece.outputs:
                yield meta.name, saved.pop(meta.name)


def saved_form(
    weights: torch.nn.Module | Mapping[str, torch.Tensor], config: Any = None
) -> SavedForm | None:
    """Returns the source for a transformers model or its state dict; None for other weights.

    Args:
        weights: a module; or tensors by their names in memory.
        config: for tensors, the configuration of their model in transformers.
    """
    if config is not None and not isinstance(weights, torch.nn.Module):
        return SavedForm(_meta_model(config.to_json_string(), config.from_dict), weights)
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(weights, modeling.PreTrainedModel):
        return None
    if "transformers.core_model_loading" not in sys.modules or weights._hf_peft_config_loaded:  # noqa: SLF001 - save_pretrained asks for the same
        return None  # before transformers 5, both forms are the same
    kept = weights.state_dict().keys()
    buffers = {name: each for name, each in weights.named_buffers() if name in kept}
    return SavedForm(weights, plain_names({**dict(weights.named_parameters()), **buffers}))


@functools.lru_cache(maxsize=1)
def _meta_model(fields: str, parse: Callable[[dict[str, Any]], Any]) -> torch.nn.Module:
    """Returns the model of a configuration, on the meta device."""
    import transformers  # noqa: PLC0415 - only who gives a configuration has it for sure

    config = parse(json.loads(fields))
    known = (getattr(transformers, name, None) for name in config.architectures or ())
    architecture = next(filter(None, known), transformers.AutoModelForCausalLM)
    make = getattr(architecture, "_from_config", None) or architecture.from_config
    with torch.device("meta"):
        model: torch.nn.Module = make(config)
    return model


_plans: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, tuple[_Piece, ...]]] = (
    weakref.WeakKeyDictionary()
)


def _plan(model: torch.nn.Module, metas: tuple[TensorMeta, ...]) -> tuple[_Piece, ...]:
    """Finds which tensors in memory each tensor of the checkpoint is made of; copies none."""
    with torch.device("meta"):
        empty = {m.name: torch.empty(m.shape, dtype=getattr(torch, m.dtype)) for m in metas}
    with _Views() as views:
        views.origins = {id(tensor): frozenset({name}) for name, tensor in empty.items()}
        saved = _revert(model, empty)
    places = {meta.name: place for place, meta in enumerate(metas)}
    groups: dict[frozenset[str], list[TensorMeta]] = {}
    renamed = set()
    for name, tensor in saved.items():
        origin = views.origins[id(tensor)]
        groups.setdefault(origin, []).append(meta_of(name, tensor))
        if any(tensor is empty[each] for each in origin):
            renamed.add(origin)
    ordered = sorted(groups, key=lambda origin: min(places[name] for name in origin))
    return tuple(
        _Piece(tuple(sorted(o, key=places.__getitem__)), tuple(groups[o]), o in renamed)
        for o in ordered
    )


def _revert(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    revert = sys.modules["transformers.core_model_loading"].revert_weight_conversion
    try:
        saved: dict[str, torch.Tensor] = revert(model, tensors)
    except Exception as error:
        names = ", ".join(list(tensors)[:4])
        raise UsageError(
            f"source={type(model).__name__}: transformers can't write {names} as its checkpoint "
            f"has them ({type(error).__name__}: {error}): pass a state dict with the checkpoint's "
            "own names, such as save_pretrained writes"
        ) from error
    return saved


class _Views(TorchFunctionMode):
    """Replaces copies in transformers' operations by views, and records results' origins.

    Attributes:
        origins: by the ``id`` of a tensor, the names of the tensors of which it is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[int, frozenset[str]] = {}
        self._alive: list[Any] = []  # so that no identity is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if self.origins:
            made = [each for each in _flat(result) if isinstance(each, torch.Tensor)]
            used = [self.origins.get(id(each), frozenset()) for each in _flat((args, kwargs))]
            for tensor in made:
                self.origins.setdefault(id(tensor), frozenset().union(*used))
            self._alive += made
        return result


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value
