"""Casts weights to the dtype of the engines' model while they are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from trainer_agent.weights.source import Devices, dtype_name, tensor_metas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.manifest import TensorMeta
    from trainer_agent.weights.source import WeightSource

# Other dtypes, such as float8 or integers, are sent unchanged.
_CAST: Final = frozenset({"float64", "float32", "bfloat16", "float16"})


class CastSource:
    """Casts the floating-point tensors of another source to one dtype.

    Each tensor is cast on its own device just before it is sent, so at most one chunk exists in
    both dtypes. Sharded tensors are gathered first, in the trainer's dtype.

    Args:
        source: the source of the tensors.
        dtype: torch's name of the dtype, such as ``bfloat16``.
    """

    def __init__(self, source: WeightSource, dtype: str) -> None:
        self._source = source
        self._dtype = dtype

    def metadata(self) -> list[TensorMeta]:
        """Returns the source's metadata with the new dtype."""
        return [
            replace(meta, dtype=self._dtype) if meta.dtype in _CAST else meta
            for meta in tensor_metas(self._source.metadata())
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype, devices = getattr(torch, self._dtype), Devices()
        for name, tensor in self._source:
            if dtype_name(tensor.dtype) in _CAST:
                devices.before_read(tensor)
                tensor = tensor.detach().to(dtype)  # noqa: PLW2901 - the same tensor, cast
            yield name, tensor
