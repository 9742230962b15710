"""The ``source`` of vLLM's trainer engines, on the bus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer_agent.sources import tensor_metas

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bus.manifest import TensorMeta
    from trainer_agent.sources import WeightSource
    from trainer_agent.weight_sync import WeightSync


@dataclass(frozen=True)
class ParamMeta:
    """One tensor of a source, as vLLM's trainer engines want it told."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class BusWeightSource:
    """vLLM's ``WeightSource`` around another source: made by :meth:`TrainerAgent.source`.

    A pass over it yields nothing before every engine is armed and paused, on every rank of the
    trainer. On rank 0 it yields what :meth:`metadata` told of, or raises.
    """

    shards = False  # what each rank yields; else every one gathers whole tensors

    def __init__(self, sync: WeightSync, inner: WeightSource) -> None:
        self._sync = sync
        self.inner = inner
        self._fresh: list[TensorMeta] | None = None

    def metadata(self) -> list[ParamMeta]:
        """What the next update is armed with. Where reading it is a collective of all ranks,
        read it on all before they send."""
        return [
            ParamMeta(meta.name, getattr(torch, meta.dtype), meta.shape) for meta in self._read()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the tensors.

        Raises:
            UsageError: the agent has another source by now, or this one does not yield what its
                metadata says.
            Refused: what the update was refused with; it was raised on rank 0 as well.
            BusTimeout: no update was started within the agent's ``timeout_s``.
        """
        return self._sync.passing(self)

    def take_metas(self) -> list[TensorMeta]:
        """The metadata that was read for the update that now begins; read here, if nobody did."""
        metas = self._read() if self._fresh is None else self._fresh
        self._fresh = None
        return metas

    def pieces(self, metas: Sequence[TensorMeta]) -> Sequence[TensorMeta]:
        """What a pass yields on this rank of these tensors."""
        return metas

    def beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass on another rank than 0."""
        return iter(self.inner)

    def _read(self) -> list[TensorMeta]:
        self._fresh = tensor_metas(self.inner.metadata())
        return self._fresh
