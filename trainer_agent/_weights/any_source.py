"""Makes a weight source from a module, a state dict or pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from bus.errors import UsageError
from trainer_agent._weights.saved_form import saved_form
from trainer_agent._weights.source import PairSource, WeightSource
from trainer_agent._weights.source_forms import FullTensors, has_property_form
from trainer_agent._weights.wrappers import plain_names, unwrapped

if TYPE_CHECKING:
    from trainer_agent._weights.source import Weights


def as_source(weights: Weights, config: Any = None) -> WeightSource:
    """Makes a source of weights in any form, such as a module or state dict.

    Args:
        weights: a module, a state dict, pairs of name and tensor, or a source, which is returned.
            A model of transformers is sent as ``save_pretrained`` would write it.
        config: for a state dict of a model of transformers, the model's configuration.

    Raises:
        UsageError: ``weights`` has another form; or transformers can't translate the model's names
            back to those of its checkpoint.
    """
    if isinstance(weights, str | bytes | PathLike):
        raise UsageError(
            f"source={weights!r}: a path; load the weights, for example by "
            "safetensors.torch.load_file, and give the module or the state dict"
        )
    weights = unwrapped(weights)
    if isinstance(weights, torch.nn.Module | Mapping):
        saved = saved_form(weights, config)
        if saved is not None:
            return saved
    elif config is not None:
        raise UsageError("config: goes with a state dict, whose names it explains")
    if isinstance(weights, torch.nn.Module):
        return PairSource(plain_names(dict(weights.named_parameters())))
    if isinstance(weights, Mapping):
        return PairSource(weights)
    if has_property_form(weights):  # first: the other check reads a property's metadata
        return FullTensors(weights)
    if isinstance(weights, WeightSource):
        return weights
    if isinstance(weights, Iterable):
        try:
            return PairSource(dict(weights))
        except (TypeError, ValueError):  # no pairs, or no text in front
            pass
    raise UsageError(
        f"source={type(weights).__name__}: must be a torch.nn.Module, a mapping of names to "
        "tensors, (name, tensor) pairs, or a WeightSource"
    )
