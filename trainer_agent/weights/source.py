"""Where weights come from: anything that a trainer has them in, as one stream.

A source is read twice: once for names, dtypes and shapes (the manifest), once for
the tensors, in the same order. Tied parameters appear once, as in
``named_parameters()``. A ``DTensor`` (FSDP2, tensor parallelism) counts with its whole shape,
and is gathered when its turn comes: a collective, which every rank of the trainer enters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from bus.errors import UsageError
from bus.manifest import TensorMeta


class AnyMeta(Protocol):
    """A :class:`bus.manifest.TensorMeta`, or vLLM's ``ParamMeta``."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> Any:
        """A ``torch.dtype``, or its name."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@runtime_checkable
class WeightSource(Protocol):
    """Metadata without transfer, and a fresh pass over the tensors for every update.

    vLLM's own weight sources are accepted as well, in both of their forms: see
    :mod:`trainer_agent.weights.source_forms`.
    """

    def metadata(self) -> Sequence[AnyMeta]:
        """Names, dtypes and full shapes, in the order of iteration."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)``: the tensors that :meth:`metadata` told of."""


Weights: TypeAlias = (
    torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | WeightSource
)


class PairSource:
    """A source over ``(name, tensor)`` pairs that can be read again and again."""

    def __init__(self, pairs: Mapping[str, torch.Tensor]) -> None:
        self._pairs = pairs

    def metadata(self) -> list[TensorMeta]:
        return [meta_of(name, tensor) for name, tensor in self._pairs.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        devices = Devices()
        for name, tensor in self._pairs.items():
            devices.before_read(tensor)  # also before its parts are gathered
            yield name, full_tensor(tensor)


class Devices:
    """GPUs that tensors of a source lie on. What a trainer has asked of one, in whatever stream, is
    done before the first tensor is read there; and what was read, before it goes on. (A source of
    one's own that makes its tensors as they are asked for, sees to what it makes them of.)"""

    def __init__(self) -> None:
        self._seen: set[torch.device] = set()

    def before_read(self, tensor: torch.Tensor) -> None:
        """It is about to be read."""
        if tensor.is_cuda and tensor.device not in self._seen:
            self._seen.add(tensor.device)
            torch.cuda.synchronize(tensor.device)

    def after_reads(self) -> None:
        """All that were, have been."""
        for device in self._seen:
            torch.cuda.synchronize(device)


def copy_source(source: WeightSource) -> PairSource:
    """Its tensors as they are now, each where it lies; takes as much memory once more."""
    devices = Devices()
    copies: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in source:
            devices.before_read(tensor)
            copies[name] = tensor.detach().clone()
    devices.after_reads()
    return PairSource(copies)


def tensor_metas(metas: Iterable[AnyMeta]) -> list[TensorMeta]:
    """What a source's metadata is for a manifest."""
    return [
        meta
        if isinstance(meta, TensorMeta)
        else TensorMeta(meta.name, dtype_name(meta.dtype), tuple(meta.shape))
        for meta in metas
    ]


def as_described(
    metas: Iterable[TensorMeta], tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The source's tensors, as long as they are those that its metadata told of.

    Raises:
        UsageError: names the tensor that is missing, or another one.
    """
    for meta in metas:
        name, tensor = next(tensors, ("", None))
        if tensor is None:
            raise UsageError(f"source: ended before {meta.name}, which its metadata has")
        # By field: to make a TensorMeta of each takes longer than to copy a small tensor.
        same = tensor.shape == meta.shape and dtype_name(tensor.dtype) == meta.dtype
        if name != meta.name or not same:
            found = meta_of(name, tensor)
            raise UsageError(f"source: yielded {found}, its metadata says {meta}")
        yield name, tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or all of one that is spread over ranks."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with torch.no_grad():
        gathered: torch.Tensor = gather()
    return gathered


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """What a manifest says of one tensor."""
    return TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape))


@functools.cache  # there are few, and tensors are many
def dtype_name(dtype: torch.dtype) -> str:
    """As manifests have it."""
    return str(dtype).removeprefix("torch.")
