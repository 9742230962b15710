"""The ``source`` of vLLM's trainer engines, which waits until engines are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from trainer_agent._weights import source_forms
from trainer_agent._weights.source import tensor_metas
from trainer_agent._weights.source_forms import EitherForm, ParamMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bus._manifest import TensorMeta
    from trainer_agent._weights.source import WeightSource

    Tensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class DescribedSource:
    """A source whose metadata is known, and is not read again.

    Args:
        metas: names, dtypes and full shapes of its tensors, in order.
        inner: the source.
    """

    def __init__(self, metas: list[TensorMeta], inner: WeightSource) -> None:
        self._metas = metas
        self._inner = inner

    def metadata(self) -> list[TensorMeta]:
        """Returns the metadata."""
        return self._metas

    def __iter__(self) -> Tensors:
        return iter(self._inner)


class BusWeightSource(EitherForm):
    """A vLLM trainer engine's ``source``, which waits until engines are ready.

    Wraps the source of the weights; :meth:`TrainerAgent.source` makes it. Iteration yields nothing
    until every engine is armed; on rank 0, until every engine waits for chunks. Iteration raises:

    - ``UsageError``: the agent now has another source; or, on rank 0, the tensors contradict the
      metadata.
    - ``Refused``: the update was refused; rank 0 raises the same error.
    - ``BusTimeout``: no update was started within the agent's ``timeout_s``.

    The next update is armed with the source's metadata. If reading the metadata is a collective,
    read it on all ranks before they send.
    """

    def __init__(self, read: Callable[..., Tensors], inner: WeightSource) -> None:
        self._read = read
        self._inner = inner
        self._shards = source_forms.local_shards(inner)
        self._fresh: list[TensorMeta] | None = None

    def describe(self) -> list[Any]:
        """Returns the wrapped source's metadata.

        A source of vLLM keeps its own metadata, which has the layout of its shards.
        """
        described = source_forms.own_metadata(self._inner)
        metas = tensor_metas(self._inner.metadata() if described is None else described)
        self._fresh = metas
        if described is not None:
            return described
        return [ParamMeta(meta.name, getattr(torch, meta.dtype), meta.shape) for meta in metas]

    def implements_iter_full(self) -> bool:
        """Returns whether the source has full tensors, so that :meth:`iter_full` works."""
        return not source_forms.yields_shards_only(self._inner)

    def implements_iter_local(self) -> bool:
        """Returns whether the source has this rank's shards, so that :meth:`iter_local` works."""
        return self._shards is not None

    def iter_full(self) -> Tensors:
        """Yields ``(name, full tensor)`` for each tensor, once engines are ready."""
        return self._read(self, shards=False)

    def iter_local(self) -> Tensors:
        """Yields ``(name, this rank's shard)`` for each tensor, once engines are ready."""
        return self._read(self, shards=True)

    def tensors(self, *, shards: bool) -> WeightSource:
        """Returns the wrapped source, or its shards; their tensors don't wait for engines.

        Args:
            shards: True: yield this rank's shards, if the source has any. False: yield full
                tensors.
        """
        return self._shards if shards and self._shards is not None else self._inner

    def take_metas(self) -> list[TensorMeta]:
        """Returns the metadata for the update that begins.

        If the trainer engine has read it since the last update, the metadata is not read again.
        """
        if self._fresh is None:
            self.describe()
        metas, self._fresh = self._fresh, None
        assert metas is not None, "it was just read"
        return metas


class BusShardSource(BusWeightSource):
    """A :class:`BusWeightSource` for vLLM's ``M2NWeightSource``, whose type vLLM checks."""

    _inner: Any

    def mesh(self) -> Any:
        """Returns the trainer's ranks, as vLLM's ``M2NMesh``."""
        return self._inner.mesh()


def wrap_source(read: Callable[..., Tensors], source: WeightSource) -> BusWeightSource:
    """Wraps a source of weights for vLLM's trainer engines.

    Args:
        read: :meth:`trainer_agent._vllm.session.TrainerEngineSession.read_source`.
        source: the source.
    """
    if not source_forms.is_m2n_source(source):
        return BusWeightSource(read, source)
    source_forms.accept_as_m2n_source(BusShardSource)
    return BusShardSource(read, source)
