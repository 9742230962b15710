"""Removes what wrappers of a module add to the names of its parameters.

``torch.compile``, ``DistributedDataParallel``, activation checkpointing and FSDP hold the wrapped
module in an attribute, whose name then stands in the names of all its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from bus.errors import UsageError

if TYPE_CHECKING:
    from bus._manifest import TensorMeta

T = TypeVar("T")

# No checkpoint has these in a name.
_WRAPPERS: Final = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
_DDP: Final = "module."
# What PEFT puts into the names of a model's own weights, and the names of its adapter's.
_PEFT: Final = re.compile(r"\.(?:base_layer|modules_to_save|original_module|lora_\w+)(?:\.|\Z)")


def unwrapped(weights: Any) -> Any:
    """Returns the module in a wrapper, or a mapping with plain names; anything else unchanged."""
    while isinstance(weights, torch.nn.Module):
        if isinstance(weights, DataParallel | DistributedDataParallel):
            weights = weights.module
        elif "_orig_mod" in weights._modules:  # noqa: SLF001 - torch names its class privately
            weights = weights._modules["_orig_mod"]  # noqa: SLF001
        else:
            return weights
    return plain_names(weights) if isinstance(weights, Mapping) else weights


def plain_names(tensors: Mapping[str, T]) -> Mapping[str, T]:
    """Strips what wrappers (DDP, FSDP, torch.compile) have added to tensor names.

    Raises:
        UsageError: two tensors would get the same name.
    """
    shorter = {name: _WRAPPERS.sub("", name) for name in tensors}
    if tensors and all(short.startswith(_DDP) for short in shorter.values()):
        shorter = {name: short.removeprefix(_DDP) for name, short in shorter.items()}
    if all(name == short for name, short in shorter.items()):
        return tensors
    plain: dict[str, T] = {}
    for name, tensor in tensors.items():
        short = shorter[name]
        if short in plain:
            raise UsageError(f"source: {short} appears twice, once as {name}, in a wrapper")
        plain[short] = tensor
    return plain


def require_whole(metas: Iterable[TensorMeta]) -> None:
    """Checks that a model's weights are not empty, nor those of PEFT's wrapper around it.

    Raises:
        UsageError: they are; the text names a tensor and says what to send.
    """
    for meta in metas:
        if 0 in meta.shape:
            raise UsageError(
                f"source: {meta.name} is empty (shape {list(meta.shape)}): send the whole tensor; "
                "gather it first if its framework has partitioned it"
            )
        if _PEFT.search(meta.name):
            raise UsageError(
                f"source: {meta.name} is a name of PEFT's: send the model that "
                "merge_and_unload() returns, or the adapter alone with update_adapter()"
            )
