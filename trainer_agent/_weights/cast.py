"""Casts weights to the dtypes of the engines' model while they are sent.

Engines keep some parameters in float32 whatever their model's dtype is: biases of routers, scales
beside quantised weights, decays of state space models. A cast of these would lose what the engine
keeps. So an engine names them when it checks the manifest (:mod:`bus._kept_dtypes`), and they are
sent as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from bus._kept_dtypes import pattern_of
from trainer_agent._weights.source import Devices, dtype_name, tensor_metas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus._manifest import TensorMeta
    from trainer_agent._weights.source import WeightSource

# Other dtypes, such as float8 or integers, are sent unchanged.
_CAST: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
_WIDE: Final = frozenset({"float64", "float32"})


class CastSource:
    """Casts the floating-point tensors of another source to the dtypes that engines keep.

    Each tensor is cast on its own device just before it is sent, so at most one chunk exists in
    both dtypes. Sharded tensors are gathered first, in the trainer's dtype.

    Args:
        dtype: torch's name of the model's dtype, such as ``bfloat16``.
        kept: patterns of the names of tensors that engines keep in float32.
    """

    def __init__(self, source: WeightSource, dtype: str, kept: set[str] | None = None) -> None:
        self._source = source
        self._dtype = dtype
        self._kept = set() if kept is None else kept

    def metadata(self) -> list[TensorMeta]:
        """Returns the source's metadata with the new dtypes."""
        metas = tensor_metas(self._source.metadata())
        return [replace(meta, dtype=self._cast(meta.name, meta.dtype)) for meta in metas]

    @property
    def is_lossy(self) -> bool:
        """Whether a tensor is cast to a narrower dtype than its own."""
        metas = tensor_metas(self._source.metadata())
        return any(m.dtype in _WIDE and self._cast(m.name, m.dtype) not in _WIDE for m in metas)

    def keep(self, patterns: frozenset[str]) -> bool:
        """Casts tensors of these names to float32 at most; returns whether that changes any."""
        before = self.metadata()
        self._kept |= patterns
        return self.metadata() != before

    def _cast(self, name: str, dtype: str) -> str:
        if dtype not in _CAST:
            return dtype
        kept = bool(self._kept) and dtype in _WIDE and pattern_of(name) in self._kept
        return "float32" if kept else self._dtype

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        devices = Devices()
        for name, tensor in self._source:
            given = dtype_name(tensor.dtype)
            if (sent := self._cast(name, given)) != given:
                devices.before_read(tensor)
                tensor = tensor.detach().to(getattr(torch, sent))  # noqa: PLW2901 - the same, cast
            yield name, tensor
