"""Copy plans: where each element of each received tensor goes in the model's parameters.

A plan is built once per manifest, from the copies that a :class:`LoaderTrace` recorded while the
model's own loader ran. Names of layers play no part in it. A plan exists only if the loader does
nothing but copy, and fills every element of every parameter exactly once. Later updates then repeat
the copies and need no loader.

The tensors of an open update come in parts. :func:`extend_plan` makes the plan of the parts so far.
When the update ends, :func:`make_plan` makes and checks the plan of all tensors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bus._manifest import TensorMeta
    from sidecar._vllm.plugin.loading.loader_trace import (
        LoaderTrace,
        Region,
        TracedCopy,
        TracedFill,
    )

# Maximum per parameter. Sorting more of them would take longer than running the loader.
MAX_RUNS: Final = 1 << 20
# Tensors of at least this size are copied one by one. On an H200, 16.4 GB in 398 pieces take 8.5 ms
# with this limit and 8.9 ms in one batched call; a single copy of all bytes takes 7.7 ms.
_LARGE_BYTES: Final = 1 << 20


class NoPlanError(Exception):
    """The reason why no copy plan can load the tensors of a manifest."""


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """Shape and dtype that a parameter or buffer has while it is loaded.

    The serving parameter may look different, for example repacked for a kernel. The loaded form is
    always contiguous.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CopyPlan:
    """The destinations of all elements of a manifest's tensors in the model.

    Attributes:
        copies: by name of a received tensor, its copies into the model; empty if this worker needs
            no element of the tensor.
        fills: by name of a parameter or buffer, its elements that are equal in every update, such
            as padding.
        targets: by name, the shape and dtype of every parameter and buffer that the plan fills.
    """

    copies: dict[str, tuple[TracedCopy, ...]]
    fills: dict[str, tuple[TracedFill, ...]]
    targets: dict[str, PlanTarget]

    def is_whole(self, chunks: Iterable[Iterable[TensorMeta]]) -> bool:
        """Returns whether this worker copies every element of the given tensors, without a cast.

        If so, the chunks can be staged without being rearranged.

        Args:
            chunks: the tensors of each chunk.
        """
        return all(
            sum(torch.Size(copy.region[1]).numel() for copy in self.copies[meta.name])
            == torch.Size(meta.shape).numel()
            and all(
                self.targets[copy.target].dtype == getattr(torch, meta.dtype)
                for copy in self.copies[meta.name]
            )
            for chunk in chunks
            for meta in chunk
        )

    @functools.cached_property
    def size_bytes(self) -> int:
        """Size in bytes of all parameters and buffers that the plan fills, not yet repacked."""
        return sum(
            torch.Size(target.shape).numel() * target.dtype.itemsize
            for target in self.targets.values()
        )


def make_plan(trace: LoaderTrace, *, unloaded: str) -> CopyPlan:
    """Makes a copy plan from the recorded load of a whole model.

    Args:
        trace: recorded while the loader was given every tensor of the manifest.
        unloaded: the parameter that no loader fills because it shares memory with another one (a
            tied output head). Empty if there is none.

    Raises:
        NoPlanError: no plan can repeat this load; the text names the tensor or parameter, and the
            reason.
    """
    if trace.beyond_copies:
        raise NoPlanError(trace.beyond_copies)
    regions: dict[str, list[Region]] = {}
    copied: set[str] = set()
    for copies in trace.copies.values():
        for copy in copies:
            regions.setdefault(copy.target, []).append(copy.region)
            copied.add(copy.target)
    fills: dict[str, tuple[TracedFill, ...]] = {}
    for fill in trace.fills:
        regions.setdefault(fill.target, []).append(fill.region)
        fills[fill.target] = (*fills.get(fill.target, ()), fill)
    for name, parameter in trace.targets.parameters.items():
        if name not in regions and name == unloaded:
            continue
        _check_filled(name, regions.get(name, ()), parameter.numel())
    targets: dict[str, PlanTarget] = {}
    for name, filled in regions.items():
        if name in trace.targets.buffers:
            _check_filled(name, filled)
        if name not in copied and trace.tensor(name).numel():
            raise NoPlanError(f"no tensor of the update fills {name}")
        targets[name] = _target(trace, name)
    return CopyPlan(_copies(trace), fills, targets)


def extend_plan(known: CopyPlan | None, trace: LoaderTrace, *, unloaded: str) -> CopyPlan:
    """Makes the copy plan of an open manifest, which may lack tensors of the model.

    Its targets are all parameters of the model, and the buffers that are filled so far.

    Args:
        known: the plan of the parts before; None for the first part.
        trace: recorded while the loader was given every tensor that is known.
        unloaded: as in :func:`make_plan`.

    Raises:
        NoPlanError: no plan can repeat this load, whatever tensors follow.
    """
    if trace.beyond_copies:
        raise NoPlanError(trace.beyond_copies)
    if known is None:
        targets = {}
        for name, parameter in trace.targets.parameters.items():
            _check_loader(name, parameter)
            if name != unloaded:
                targets[name] = _target(trace, name)
    else:
        targets = dict(known.targets)
    added = _copies(trace, {} if known is None else known.copies)
    fills: dict[str, tuple[TracedFill, ...]] = {}
    for fill in trace.fills:
        fills[fill.target] = (*fills.get(fill.target, ()), fill)
    for name in (*fills, *(copy.target for copies in added.values() for copy in copies)):
        if name not in targets:
            targets[name] = _target(trace, name)
    return CopyPlan(added if known is None else known.copies | added, fills, targets)


def _copies(
    trace: LoaderTrace, known: Mapping[str, object] = MappingProxyType({})
) -> dict[str, tuple[TracedCopy, ...]]:
    """Returns the copies of each traced tensor that follows those in ``known``."""
    metas = enumerate(trace.metas[len(known) :], len(known))
    return {meta.name: tuple(trace.copies.get(index, ())) for index, meta in metas}


def _check_loader(name: str, parameter: torch.Tensor) -> None:
    """Raises :class:`NoPlanError` if vLLM will do more than copy tensors into a parameter.

    A parameter that passes may still turn out to need more when the loader gets its tensor.
    """
    loaded = getattr(parameter, "weight_loader_numel", parameter.numel())
    if loaded != parameter.numel():
        raise NoPlanError(f"only {loaded} of {parameter.numel()} elements of {name} are filled")
    loader = getattr(getattr(parameter, "weight_loader", None), "__qualname__", "")
    if loader.startswith("composed_weight_loader."):  # vLLM's, of Mamba
        raise NoPlanError(f"{name} is computed from the loaded tensor")


def _target(trace: LoaderTrace, name: str) -> PlanTarget:
    tensor = trace.tensor(name)
    if not tensor.is_contiguous() or tensor.storage_offset():
        raise NoPlanError(f"{name} is not contiguous")
    return PlanTarget(tuple(tensor.shape), tensor.dtype)


def part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Returns a view of some elements of a contiguous tensor.

    Args:
        tensor: the tensor.
        region: the elements: offset in the tensor, sizes and strides, all in elements.
    """
    offset, sizes, strides = region
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


class CopyBatch:
    """Copies of tensors, prepared once and executed in each update.

    Small tensors are copied together in one call. On a GPU, large ones are copied one by one, which
    is faster for them.

    Args:
        targets: the tensors to copy to.
        sources: the tensors to copy from, in the same order.

    Attributes:
        numel: how many elements are copied.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._apart: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            alike = target.device == source.device and target.dtype == source.dtype
            large = target.is_cuda and target.nbytes >= _LARGE_BYTES
            if alike and not large and target.is_contiguous() and source.is_contiguous():
                self._targets.append(target)
                self._sources.append(source)
            else:
                self._apart.append((target, source))
        self.numel = sum(target.numel() for target in targets)

    def run(self) -> None:
        """Copies every source into its target."""
        for target, source in self._apart:
            target.copy_(source)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def _check_filled(name: str, regions: Iterable[Region], numel: int | None = None) -> None:
    """Checks that no element is filled twice and, with ``numel``, that all are filled."""
    end = 0
    for begin, length in _runs(name, regions):
        if begin < end:
            raise NoPlanError(f"elements of {name} are filled twice")
        if begin > end and numel is not None:
            raise NoPlanError(f"elements {end} to {begin} of {name} are not filled")
        end = begin + length
    if numel is not None and end != numel:
        raise NoPlanError(f"only {end} of {numel} elements of {name} are filled")


def _runs(name: str, regions: Iterable[Region]) -> list[tuple[int, int]]:
    """Returns the contiguous runs that the regions cover, sorted: (begin, length) in elements."""
    runs: list[tuple[int, int]] = []
    for offset, sizes, strides in regions:
        begins, length, reach = [offset], 1, 1
        for step, count in sorted(zip(strides, sizes, strict=True)):
            if count == 0:
                begins = []
                break
            if count == 1:
                continue
            if step < reach:
                raise NoPlanError(f"elements of {name} are filled twice")
            if step == length and len(begins) == 1:
                length *= count
            else:
                if len(begins) * count + len(runs) > MAX_RUNS:
                    raise NoPlanError(f"{name} is filled in too many pieces")
                begins = [begin + step * i for begin in begins for i in range(count)]
            reach += (count - 1) * step
        runs.extend((begin, length) for begin in begins)
    return sorted(runs)
