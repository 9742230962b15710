"""The ``source`` of vLLM's trainer engines, on the bus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainer_agent.weights import source_forms
from trainer_agent.weights.source import tensor_metas
from trainer_agent.weights.source_forms import EitherForm, ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.manifest import TensorMeta
    from trainer_agent.weights.source import WeightSource


class SourceReader(Protocol):
    """Reads sources: a :class:`trainer_agent.vllm.session.TrainerEngineSession`."""

    def read_source(
        self, source: BusWeightSource, *, shards: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of a source: whole ones, or this rank's shards."""


class BusWeightSource(EitherForm):
    """vLLM's ``WeightSource`` around another source: made by :meth:`TrainerAgent.source`.

    A pass over it yields nothing before every engine is armed and paused, on every rank of the
    trainer. On rank 0 it yields what its metadata describes, or raises:

    - ``UsageError``: the agent has another source by now, or this one does not yield what its
      metadata says.
    - ``Refused``: what the update was refused with; it was raised on rank 0 as well.
    - ``BusTimeout``: no update was started within the agent's ``timeout_s``.

    Its metadata is what the next update is armed with. Where reading it is a collective of all
    ranks, read it on all before they send.
    """

    def __init__(self, session: SourceReader, inner: WeightSource) -> None:
        self._session = session
        self._inner = inner
        self._shards = source_forms.local_shards(inner)
        self._fresh: list[TensorMeta] | None = None

    def describe(self) -> list[Any]:
        """Returns the inner source's metadata, in vLLM's form where it has a layout of shards."""
        described = source_forms.own_metadata(self._inner)
        metas = tensor_metas(self._inner.metadata() if described is None else described)
        self._fresh = metas
        if described is not None:
            return described
        return [ParamMeta(meta.name, getattr(torch, meta.dtype), meta.shape) for meta in metas]

    def implements_iter_full(self) -> bool:
        """Returns whether :meth:`iter_full` works."""
        return not source_forms.yields_shards_only(self._inner)

    def implements_iter_local(self) -> bool:
        """Returns whether :meth:`iter_local` works."""
        return self._shards is not None

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors, once engines are ready."""
        return self._session.read_source(self, shards=False)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields this rank's shards, once engines are ready."""
        return self._session.read_source(self, shards=True)

    def tensors(self, *, shards: bool) -> WeightSource:
        """Returns what a pass reads without waiting for engines.

        That is this rank's shards if there are any and ``shards`` is set, otherwise whole tensors.
        """
        return self._shards if shards and self._shards is not None else self._inner

    def take_metas(self) -> list[TensorMeta]:
        """Returns the metadata that was read for the update that now begins.

        It is read now if nobody has read it.
        """
        if self._fresh is None:
            self.describe()
        metas, self._fresh = self._fresh, None
        assert metas is not None, "it was just read"
        return metas


class BusShardSource(BusWeightSource):
    """A :class:`BusWeightSource` around vLLM's ``M2NWeightSource``."""

    _inner: Any

    def mesh(self) -> Any:
        """Returns the trainer's ranks, as vLLM's ``M2NMesh``."""
        return self._inner.mesh()


def wrap_source(session: SourceReader, source: WeightSource) -> BusWeightSource:
    """Returns ``source`` on the bus."""
    if not source_forms.is_m2n_source(source):
        return BusWeightSource(session, source)
    source_forms.accept_as_m2n_source(BusShardSource)
    return BusShardSource(session, source)
