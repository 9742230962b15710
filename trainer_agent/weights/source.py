"""Sources of weights: anything that a trainer has them in, as one stream.

A source is read twice: once for names, dtypes and shapes (the manifest), once for the tensors, in
the same order. Tied parameters appear once, as in ``named_parameters()``. A ``DTensor`` (FSDP2,
tensor parallelism) has its whole shape, and is gathered when it is read, in a collective that every
rank of the trainer enters.
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
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def dtype(self) -> Any:
        """A ``torch.dtype``, or its name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""


@runtime_checkable
class WeightSource(Protocol):
    """Metadata without transfer, and a fresh pass over the tensors for every update.

    vLLM's own weight sources are accepted as well, in both of their forms: see
    :mod:`trainer_agent.weights.source_forms`.
    """

    def metadata(self) -> Sequence[AnyMeta]:
        """Returns names, dtypes and whole shapes, in the order of iteration."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)`` for each tensor of :meth:`metadata`, in the same order."""


Weights: TypeAlias = (
    torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | WeightSource
)


class PairSource:
    """Yields ``(name, tensor)`` pairs, which can be read again and again."""

    def __init__(self, pairs: Mapping[str, torch.Tensor]) -> None:
        self._pairs = pairs

    def metadata(self) -> list[TensorMeta]:
        """Returns names, dtypes and whole shapes."""
        return [meta_of(name, tensor) for name, tensor in self._pairs.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        devices = Devices()
        for name, tensor in self._pairs.items():
            devices.before_read(tensor)  # also before its parts are gathered
            yield name, full_tensor(tensor)


class Devices:
    """Synchronizes with the GPUs of a source's tensors.

    The trainer's work on a GPU, in every stream, is finished before the first tensor is read there.
    A source that makes its tensors on demand must itself wait for what it makes them of.
    """

    def __init__(self) -> None:
        self._seen: set[torch.device] = set()

    def before_read(self, tensor: torch.Tensor) -> None:
        """Waits for the trainer's work on a tensor's GPU, before the first read there."""
        if tensor.is_cuda and tensor.device not in self._seen:
            self._seen.add(tensor.device)
            torch.cuda.synchronize(tensor.device)

    def after_reads(self) -> None:
        """Waits until all tensors are read."""
        for device in self._seen:
            torch.cuda.synchronize(device)


def copy_source(source: WeightSource) -> PairSource:
    """Copies a source's tensors, each on its device."""
    devices = Devices()
    copies: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in source:
            devices.before_read(tensor)
            copies[name] = tensor.detach().clone()
    devices.after_reads()
    return PairSource(copies)


def tensor_metas(metas: Iterable[AnyMeta]) -> list[TensorMeta]:
    """Returns a source's metadata in the form of a manifest."""
    return [
        meta
        if isinstance(meta, TensorMeta)
        else TensorMeta(meta.name, dtype_name(meta.dtype), tuple(meta.shape))
        for meta in metas
    ]


def as_described(
    metas: Iterable[TensorMeta], tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a source's tensors, and checks each against the metadata.

    Raises:
        UsageError: a tensor is missing, or is another one; the text names it.
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
    """Returns a tensor; gathers it first if it is spread over ranks."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with torch.no_grad():
        gathered: torch.Tensor = gather()
    return gathered


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Returns the metadata of one tensor."""
    return TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape))


@functools.cache  # there are few, and tensors are many
def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in manifests, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
