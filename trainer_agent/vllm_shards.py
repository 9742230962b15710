"""What vLLM's ``nccl_m2n`` trainer engine reads: a source of shards, on the bus."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.m2n_common import REPLICATE
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

from trainer_agent.bus_source import BusWeightSource
from trainer_agent.sources import as_announced, tensor_metas

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bus.manifest import TensorMeta


class BusShardSource(BusWeightSource, M2NWeightSource):  # type: ignore[misc]
    """A :class:`BusWeightSource` around an ``M2NWeightSource``: every rank yields its shards, and
    each of them must be as long as its layout says."""

    shards = True
    inner: Any

    def mesh(self) -> Any:
        """The trainer's ranks, as vLLM's ``M2NMesh``."""
        return self.inner.mesh()

    def metadata(self) -> list[Any]:
        """vLLM's ``M2NParamMeta`` of each tensor: full shapes, with placements."""
        self._read()
        return list(self.inner.metadata())

    def pieces(self, metas: Sequence[TensorMeta]) -> Sequence[TensorMeta]:
        placed = {meta.name: meta.placements for meta in self.inner.metadata()}
        dims = self.inner.mesh().dims
        return [_piece(meta, placed.get(meta.name), dims) for meta in metas]

    def beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        metas = tensor_metas(self.inner.metadata())
        return as_announced(self.pieces(metas), iter(self.inner))


def _piece(
    meta: TensorMeta, placements: tuple[int, int] | None, dims: tuple[int, int]
) -> TensorMeta:
    """One rank's part of a tensor; a layout that does not divide it, vLLM has refused by then."""
    shape = list(meta.shape)
    for ranks, dim in zip(dims, placements or (), strict=False):
        if dim != REPLICATE:
            shape[dim] //= ranks
    return dataclasses.replace(meta, shape=tuple(shape))
