"""The interface of weight sources, which yield a trainer's weights as one stream.

A source is read twice: once for names, dtypes and shapes (the manifest), once for the tensors, in
the same order. Tied parameters appear once, as in ``named_parameters()``. A ``DTensor`` (FSDP2,
tensor parallelism) is described with its full shape. When it is read, it is gathered in a
collective that every rank of the trainer enters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from bus._manifest import TensorMeta
from bus.errors import UsageError


class AnyMeta(Protocol):
    """A source's metadata of one tensor.

    Either a :class:`bus._manifest.TensorMeta`, or vLLM's ``ParamMeta``.
    """

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""

    @property
    def dtype(self) -> Any:
        """The tensor's ``torch.dtype``, or the name of that dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's full shape."""


@runtime_checkable
class WeightSource(Protocol):
    """A trainer's weights: their metadata, and an iterator over the tensors.

    The tensors are read once for each update. vLLM's own weight sources are accepted as well, in
    both of their forms: see :mod:`trainer_agent._weights.source_forms`.
    """

    def metadata(self) -> Sequence[AnyMeta]:
        """Returns names, dtypes and full shapes, in the order of iteration."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)`` for each tensor of :meth:`metadata`, in that order."""


Weights: TypeAlias = (
    torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | WeightSource
)


class PairSource:
    """A source of ``(name, tensor)`` pairs in memory, which can be read any number of times.

    Sharded tensors are gathered when they are read.
    """

    def __init__(self, pairs: Mapping[str, torch.Tensor]) -> None:
        self._pairs = pairs

    def metadata(self) -> list[TensorMeta]:
        """Returns names, dtypes and full shapes."""
        for name, tensor in self._pairs.items():
            require_sendable(name, tensor)
        return [meta_of(name, tensor) for name, tensor in self._pairs.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        devices = Devices()
        for name, tensor in self._pairs.items():
            if not hasattr(tensor, "is_cuda"):
                require_sendable(name, tensor)
            devices.before_read(tensor)  # also before its parts are gathered
            yield name, full_tensor(tensor)


class Devices:
    """Waits for the GPUs that hold a source's tensors.

    Before the first read on a GPU, waits until the trainer's work there has ended, in all streams.
    A source that computes tensors on demand must itself wait for the inputs.
    """

    def __init__(self) -> None:
        self._seen: set[torch.device] = set()

    def before_read(self, tensor: torch.Tensor) -> None:
        """Waits for the trainer's work on a tensor's GPU, before the first read there."""
        if tensor.is_cuda and tensor.device not in self._seen:
            self._seen.add(tensor.device)
            torch.cuda.synchronize(tensor.device)

    def after_reads(self) -> None:
        """Waits until the GPUs have read all tensors."""
        for device in self._seen:
            torch.cuda.synchronize(device)


def copy_source(source: WeightSource) -> PairSource:
    """Returns a source of copies: each tensor is copied now, on its own device."""
    devices = Devices()
    copies: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in source:
            require_sendable(name, tensor)
            devices.before_read(tensor)
            copies[name] = tensor.detach().clone()
    devices.after_reads()
    return PairSource(copies)


def tensor_metas(metas: Iterable[AnyMeta]) -> list[TensorMeta]:
    """Returns a source's metadata as :class:`bus._manifest.TensorMeta`."""
    return [
        meta
        if isinstance(meta, TensorMeta)
        else TensorMeta(meta.name, dtype_name(meta.dtype), tuple(meta.shape))
        for meta in metas
    ]


def as_described(
    metas: Iterable[TensorMeta], tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a source's tensors after comparing each with the metadata.

    Args:
        metas: names, dtypes and full shapes, in order.
        tensors: the source's ``(name, tensor)`` pairs.

    Raises:
        UsageError: a tensor is missing, or differs from its metadata; the text names it.
    """
    for meta in metas:
        name, tensor = next(tensors, ("", None))
        if not name and tensor is None:
            raise UsageError(f"source: ended before {meta.name}, which its metadata has")
        require_sendable(name, tensor)
        assert tensor is not None
        # Compare by field: making a TensorMeta takes longer than copying a small tensor.
        same = tensor.shape == meta.shape and dtype_name(tensor.dtype) == meta.dtype
        if name != meta.name or not same:
            found = meta_of(name, tensor)
            raise UsageError(f"source: yielded {found}, its metadata says {meta}")
        yield name, tensor


def require_sendable(name: str, tensor: object) -> None:
    """Checks that a source's value is a dense tensor with values.

    Raises:
        UsageError: it is not; the text names the tensor and says what to do.
    """
    kind = type(tensor)
    if kind.__module__ == "numpy" or not hasattr(tensor, "dtype"):
        hint = ": torch.from_numpy makes one" if kind.__module__ == "numpy" else ""
        raise UsageError(f"source: {name} is a {kind.__name__}, not a torch.Tensor{hint}")
    if getattr(tensor, "is_meta", False):
        raise UsageError(
            f"source: {name} is on the meta device and has no values: load or initialise it first"
        )
    if (layout := getattr(tensor, "layout", torch.strided)) is not torch.strided:
        raise UsageError(f"source: {name} is sparse ({layout}): send its to_dense()")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor; gathers it if it is sharded over ranks."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with torch.no_grad():
        gathered: torch.Tensor = gather()
    return gathered


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Returns the metadata of one tensor."""
    return TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape))


@functools.cache  # few dtypes, many tensors
def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name in manifests, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
