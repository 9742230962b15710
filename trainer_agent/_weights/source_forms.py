"""Adapts the two forms of vLLM's weight sources; other modules need not distinguish them.

================== ================================== ======================================
                   the method form (0.28 to 0.32)     the property form (from 0.33)
================== ================================== ======================================
metadata           ``source.metadata()``              ``source.metadata``
whole tensors      ``iter(source)``                   ``source.iter_full()``
one rank's shards  ``iter(source)``, of an            ``source.iter_local()``
                   ``M2NWeightSource``
layout of shards   ``source.mesh()``, and integers    ``mesh_shape`` and objects in
                   in each tensor's ``placements``    ``placements``, of each tensor
================== ================================== ======================================

A source's class shows its form, whatever vLLM's version. This module does not import vLLM, because
trainers without vLLM use it too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_M2N_SOURCE: Final = "vllm.distributed.weight_transfer.m2n_source"
_REPLICATE: Final = -1  # among placements of the method form; the others are dimensions


@dataclass(frozen=True)
class ParamMeta:
    """A tensor's metadata, which vLLM's trainer engines of both forms accept.

    Attributes:
        name: the tensor's name in the checkpoint.
        dtype: its dtype.
        shape: its full shape.
        owners: the trainer's ranks that yield the tensor; None: every rank.
        mesh_shape: the shape of the mesh of the trainer's ranks; None: tensors are not sharded.
        placements: for each dimension of the mesh, how the tensor is sharded or replicated.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class Metadata(list[Any]):
    """Metadata that trainer engines of both forms can read.

    Trainer engines of the property form read it directly; those of the method form call it.
    """

    def __call__(self) -> Metadata:
        """Returns itself."""
        return self


class EitherForm:
    """The base class of sources that vLLM's trainer engines of both forms accept.

    Subclasses define :meth:`describe`, and :meth:`iter_full` or :meth:`iter_local`. A subclass
    without full tensors also redefines :meth:`implements_iter_full`, and one with shards
    :meth:`implements_iter_local`.
    """

    @property
    def metadata(self) -> Metadata:
        """The metadata of all tensors, in the order of iteration. No tensor is gathered for it."""
        return Metadata(self.describe())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.iter_full() if self.implements_iter_full() else self.iter_local()

    def implements_iter_full(self) -> bool:
        """Returns whether the source has full tensors, so that :meth:`iter_full` works."""
        return True

    def implements_iter_local(self) -> bool:
        """Returns whether the source has this rank's shards, so that :meth:`iter_local` works."""
        return False

    def owned_names(self, rank: int) -> list[str]:
        """Returns the names of the tensors that trainer rank ``rank`` yields."""
        metas = self.metadata
        return [meta.name for meta in metas if meta.owners is None or rank in meta.owners]

    def describe(self) -> list[Any]:
        """Returns the :class:`ParamMeta`, or vLLM's own metadata, of every tensor."""
        raise NotImplementedError

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)`` for each tensor of :attr:`metadata`, as a whole.

        A sharded tensor is gathered from all ranks of the trainer, which must all iterate.
        """
        raise NotImplementedError

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)`` for each tensor of :attr:`metadata`, as this rank's shard."""
        raise NotImplementedError


class FullTensors:
    """Reads whole tensors of a source that has the property form.

    Gives such a source the interface :class:`trainer_agent._weights.source.WeightSource`.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def metadata(self) -> list[Any]:
        """Returns the source's metadata.

        Raises:
            UsageError: the source yields shards only.
        """
        if not self.source.implements_iter_full():
            raise UsageError(
                f"source={type(self.source).__name__}: it implements iter_local() only, and whole "
                "tensors are sent here: implement iter_full()"
            )
        return list(self.source.metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors: Iterator[tuple[str, torch.Tensor]] = self.source.iter_full()
        return tensors


class LocalShards:
    """Reads this rank's shards of a source of either form.

    Gives the source the interface :class:`trainer_agent._weights.source.WeightSource`; the metadata
    has the shapes of the shards.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def metadata(self) -> list[ParamMeta]:
        """Returns the shards' names, dtypes and shapes.

        Shards divide a tensor evenly: vLLM's trainer engine refuses other layouts.
        """
        if has_property_form(self._source):
            return [_shard(meta, meta.mesh_shape) for meta in self._source.metadata]
        dims = self._source.mesh().dims
        return [_shard(meta, dims) for meta in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        source = self._source
        tensors: Iterator[tuple[str, torch.Tensor]] = (
            source.iter_local() if has_property_form(source) else iter(source)
        )
        return tensors


def has_property_form(source: object) -> bool:
    """Returns whether a source has the property form, without reading its metadata."""
    return callable(getattr(type(source), "implements_iter_full", None))


def yields_shards_only(source: object) -> bool:
    """Returns whether a source made by ``as_source`` can't yield full tensors."""
    if isinstance(source, FullTensors):
        return not source.source.implements_iter_full()
    return is_m2n_source(source)


def local_shards(source: object) -> LocalShards | None:
    """Returns the shards of a source made by ``as_source``; None if it has none."""
    if isinstance(source, FullTensors):
        return LocalShards(source.source) if source.source.implements_iter_local() else None
    return LocalShards(source) if is_m2n_source(source) else None


def own_metadata(source: Any) -> list[Any] | None:
    """Returns a vLLM source's own metadata, with the layout of its shards.

    None if ``source`` (made by ``as_source``) has neither the property form nor shards.
    """
    if isinstance(source, FullTensors):
        return list(source.source.metadata)
    return list(source.metadata()) if is_m2n_source(source) else None


def is_m2n_source(source: object) -> bool:
    """Returns whether ``source`` is vLLM's ``M2NWeightSource`` (shards, method form).

    Imports nothing: if such a source exists, vLLM's module is imported already.
    """
    module = sys.modules.get(_M2N_SOURCE)
    return module is not None and isinstance(source, module.M2NWeightSource)


def accept_as_m2n_source(wrapper: type[Any]) -> None:
    """Makes the class ``wrapper`` pass vLLM's check for ``M2NWeightSource``."""
    sys.modules[_M2N_SOURCE].M2NWeightSource.register(wrapper)


def _shard(meta: Any, dims: tuple[int, ...] | None) -> ParamMeta:
    shape = list(meta.shape)
    for ranks, placement in zip(dims or (), meta.placements or (), strict=False):
        dim = placement if isinstance(placement, int) else getattr(placement, "dim", _REPLICATE)
        if dim != _REPLICATE:
            shape[dim] //= ranks
    return ParamMeta(meta.name, meta.dtype, tuple(shape))
