"""Says where each element of each received tensor ends up in the model: a plan to copy by.

The plan is made of what a :class:`LoaderTrace` saw the model's own loader do, once per manifest,
and never of names of layers. There is a plan only where copies are all that the loader does, and
where they fill every element of every parameter exactly once, so that repeating them needs no
loader.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bus.manifest import TensorMeta
    from sidecar.vllm.plugin.loading.loader_trace import LoaderTrace, Region, TracedCopy, TracedFill

# Of one parameter: more would take longer to sort than a loader takes.
MAX_RUNS: Final = 1 << 20
# On an H200, 16.4 GB in 398 pieces take 8.9 ms in one go, 8.5 ms with those apart that have as much
# as this; one copy of all takes 7.7 ms.
_LARGE_BYTES: Final = 1 << 20


class NoPlanError(Exception):
    """Says why these tensors can't be copied by a plan."""


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """A parameter or buffer as the loader fills it: contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CopyPlan:
    """Says where the elements of each tensor go.

    Attributes:
        copies: by every tensor of the manifest; empty for one that this worker takes nothing of.
        fills: by target, what is the same in every update, such as padding.
        targets: everything that is filled, by name.
    """

    copies: dict[str, tuple[TracedCopy, ...]]
    fills: dict[str, tuple[TracedFill, ...]]
    targets: dict[str, PlanTarget]

    def is_whole(self, chunks: Iterable[Iterable[TensorMeta]]) -> bool:
        """Return whether all of each of these tensors is copied, and none is cast."""
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
        """The size of all targets."""
        return sum(
            torch.Size(target.shape).numel() * target.dtype.itemsize
            for target in self.targets.values()
        )


def make_plan(trace: LoaderTrace, *, unloaded: str) -> CopyPlan:
    """Return the plan of a whole load.

    Args:
        trace: of a loader that was given every tensor.
        unloaded: the parameter that no loader fills, because it is another one as well: a tied
            head. Empty for none.

    Raises:
        NoPlanError: with the tensor or parameter, and why.
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
        tensor = trace.tensor(name)
        if name in trace.targets.buffers:
            _check_filled(name, filled)
        if name not in copied and tensor.numel():
            raise NoPlanError(f"{name} is filled with no tensor")
        if not tensor.is_contiguous() or tensor.storage_offset():
            raise NoPlanError(f"{name} is not contiguous")
        targets[name] = PlanTarget(tuple(tensor.shape), tensor.dtype)
    names = [meta.name for meta in trace.metas]
    by_name = {name: tuple(trace.copies.get(i, ())) for i, name in enumerate(names)}
    return CopyPlan(by_name, fills, targets)


def part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the view that a region describes, of a contiguous tensor."""
    offset, sizes, strides = region
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


class CopyBatch:
    """Copies from each source into the target at the same place.

    Small tensors are copied together in one call, large ones each by itself, which is faster for
    them on a GPU.
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
        """Copy; it may be called again."""
        for target, source in self._apart:
            target.copy_(source)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def _check_filled(name: str, regions: Iterable[Region], numel: int | None = None) -> None:
    """Check that no element is filled twice, and, with ``numel``, that each is filled."""
    end = 0
    for begin, length in _runs(name, regions):
        if begin < end:
            raise NoPlanError(f"elements of {name} are filled twice")
        if begin > end and numel is not None:
            raise NoPlanError(f"elements {end} to {begin} of {name} are not filled")
        end = begin + length
    if numel is not None and end != numel:
        raise NoPlanError(f"of {name} {end} of {numel} elements are filled")


def _runs(name: str, regions: Iterable[Region]) -> list[tuple[int, int]]:
    """Return what the regions cover as contiguous runs in order: begin and length, in elements."""
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
