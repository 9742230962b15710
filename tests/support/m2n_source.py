"""A source of vLLM's kind for a trainer with one rank: whole tensors, replicated on it.

It has the form that this vLLM's sources have: see :mod:`trainer_agent._weights.source_forms`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer import base

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

PROPERTY_FORM = hasattr(base.WeightSource, "iter_local")


def module_source(module: Any, ranks: int, *, shards: bool) -> Any:
    """Returns vLLM's own source over a module, for a trainer of ``ranks`` ranks."""
    if PROPERTY_FORM or not shards:
        return base.ModuleSource(module)
    from vllm.distributed.weight_transfer.m2n_source import (  # noqa: PLC0415 - only this form has it
        DTensorModuleSource,
    )

    return DTensorModuleSource(module, ranks)


if PROPERTY_FORM:

    class Replicated(base.WeightSource):  # type: ignore[misc]
        """As ``ModuleSource`` is of plain parameters."""

        def __init__(self, weights: Mapping[str, Tensor]) -> None:
            self._weights = weights

        @cached_property
        def metadata(self) -> list[Any]:
            return [
                base.ParamMeta(name, weight.dtype, tuple(weight.shape))
                for name, weight in self._weights.items()
            ]

        def iter_local(self) -> Iterator[tuple[str, Tensor]]:
            return iter(self._weights.items())

else:
    from vllm.distributed.weight_transfer.m2n_common import REPLICATED, M2NMesh, M2NParamMeta
    from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

    class Replicated(M2NWeightSource):  # type: ignore[misc,no-redef]
        """As ``DTensorModuleSource`` is of plain parameters."""

        def __init__(self, weights: Mapping[str, Tensor]) -> None:
            self._weights = weights

        def mesh(self) -> M2NMesh:
            return M2NMesh((1, 1), 0)

        def metadata(self) -> list[M2NParamMeta]:
            return [
                M2NParamMeta(name, weight.dtype, tuple(weight.shape), REPLICATED)
                for name, weight in self._weights.items()
            ]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(self._weights.items())
