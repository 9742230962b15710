"""A source of vLLM's kind for a trainer with one rank: whole tensors, which may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.weight_transfer.m2n_common import REPLICATED, M2NMesh, M2NParamMeta
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


class Replicated(M2NWeightSource):  # type: ignore[misc]
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
