"""Decides where in staging memory the tensors of an update lie.

==================  ===========================  ================================================
layout              memory holds                 used when
==================  ===========================  ================================================
:class:`AsSent`     chunks, packed as sent       the worker uses all of every tensor, and serves
                                                 its weights as they are loaded
:class:`ByTarget`   parameters and buffers       otherwise: the worker uses shards, casts dtypes,
                                                 or repacks layers; or the update is open
==================  ===========================  ================================================

With :class:`AsSent` the transport can receive a chunk directly into the chunk's place: nothing is
copied before the swap, while the worker runs steps. With :class:`ByTarget`, memory holds no more
than this worker's part of the update.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch

from bus._weight_transfer.packing import ReceivedChunk, ViewCache, packed_offsets
from sidecar._vllm.plugin.loading.copy_plan import CopyBatch, part
from sidecar._vllm.plugin.loading.plan_runner import copies, pad

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bus._manifest import TensorMeta
    from sidecar._vllm.plugin.loading.copy_plan import CopyPlan
    from sidecar._vllm.plugin.loading.loader_trace import Region, TracedCopy, TracedFill
    from sidecar._vllm.plugin.loading.plan_runner import Received
    from sidecar._vllm.plugin.loading.staging_buffers import Shapes

    Memory = Mapping[str, torch.Tensor]


_ALL: Final = "all"  # the name of the single buffer


def shapes_of(plan: CopyPlan) -> Shapes:
    """Returns the memory in which a layout by target keeps everything that the plan fills."""
    return {name: (each.shape, each.dtype) for name, each in plan.targets.items()}


class StagingLayout(ABC):
    """Decides where in staging memory the tensors of one manifest lie.

    Attributes:
        plan: where each element goes in the model.
        shapes: names, shapes and dtypes of the memory that the layout needs.
        missing: how many elements are not staged yet.
    """

    shapes: Shapes

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        self.missing = 0
        self._memory: Memory = {}
        self._staged: set[int] = set()
        # Copies of chunks whose buffers the next update will reuse.
        self._planned: WeakKeyDictionary[ReceivedChunk, CopyBatch] = WeakKeyDictionary()

    def begin(self, memory: Memory) -> None:
        """Begins to stage an update.

        Args:
            memory: tensors with the names, shapes and dtypes of :attr:`shapes`. Views of the same
                memory are reused from update to update.
        """
        if memory is not self._memory:
            self.discard()
            self._memory = memory
        self._staged.clear()
        self._start()

    def stage(self, seq: int, tensors: Received) -> bool:
        """Copies a received chunk into the staging memory, unless it was received there.

        Args:
            seq: number of the chunk.
            tensors: the chunk's ``(name, tensor)`` pairs.

        Returns:
            Whether the chunk was copied; False if it had been received straight into the staging
                memory (:meth:`buffer_for`).

        Raises:
            KeyError: the manifest has no tensor of that name.
        """
        room = self.buffer_for(seq)
        if room is not None and room is tensors:
            numel, copied = room.numel, False
        else:
            numel, copied = self._copy(seq, tensors).numel, True
        if seq not in self._staged:
            self._staged.add(seq)
            self.missing -= numel
        return copied

    def stage_part(self, seq: int, tensors: Received) -> None:
        """Puts some tensors of a chunk into the memory, each of them once.

        Args:
            seq: number of the chunk.
            tensors: ``(name, tensor)`` pairs.

        Raises:
            KeyError: the manifest has no tensor of that name.
        """
        self._staged.add(seq)
        batch = self._plan_chunk(seq, tensors)
        batch.run()
        self.missing -= batch.numel

    def discard(self) -> None:
        """Drops views and prepared copies of memory that was released."""
        self._memory = {}
        self._planned.clear()

    def buffer_for(self, seq: int) -> ReceivedChunk | None:  # noqa: ARG002 - not every layout has one
        """Returns the memory into which a chunk can be received directly; None without one."""
        return None

    def _copy(self, seq: int, tensors: Received) -> CopyBatch:
        again = tensors if isinstance(tensors, ReceivedChunk) else None
        batch = None if again is None else self._planned.get(again)
        if batch is None:
            batch = self._plan_chunk(seq, tensors)
            if again is not None:
                self._planned[again] = batch
        batch.run()
        return batch

    @abstractmethod
    def find(self, target: str, region: Region) -> torch.Tensor | None:
        """Returns staged elements of a parameter or buffer.

        Args:
            target: the name of the parameter or buffer.
            region: the elements: offset, sizes and strides, in elements.

        Returns:
            A view of the elements in staging memory; None if they have no place there or, in
                :class:`AsSent`, are not staged yet.
        """

    @abstractmethod
    def into(self, targets: Memory) -> CopyBatch:
        """Prepares the copies that move all staged weights into the given tensors.

        Args:
            targets: by name, the parameters and buffers to fill, in the copy plan's shapes.
        """

    def pad(self, targets: Memory) -> None:  # noqa: B027 - not every layout has to
        """Writes the constants that :meth:`into` does not copy, such as padding.

        Args:
            targets: by name, the parameters and buffers to fill, in the copy plan's shapes.
        """

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _plan_chunk(self, seq: int, tensors: Received) -> CopyBatch: ...


class ByTarget(StagingLayout):
    """Stages weights in one tensor for each parameter or buffer of the worker."""

    def __init__(self, plan: CopyPlan) -> None:
        super().__init__(plan)
        self.shapes = shapes_of(plan)

    def find(self, target: str, region: Region) -> torch.Tensor | None:
        """Returns elements of a parameter or buffer; None if the plan does not fill it."""
        there = self._memory.get(target)
        return None if there is None else part(there, region)

    def into(self, targets: Memory) -> CopyBatch:
        """Prepares one copy for each parameter or buffer."""
        return CopyBatch(list(targets.values()), [self._memory[name] for name in targets])

    def _start(self) -> None:
        self.missing = sum(each.numel() for each in self._memory.values())
        self._pad(self.plan.fills)

    def extend(self, plan: CopyPlan) -> None:
        """Continues an open update by a plan with further tensors, which have memory."""
        before, self.plan = self.plan, plan
        self.shapes = {**self.shapes, **shapes_of(plan)}
        further = plan.targets.keys() - before.targets.keys()
        self.missing += sum(self._memory[name].numel() for name in further)
        fills = plan.fills.items()
        self._pad({name: each[len(before.fills.get(name, ())) :] for name, each in fills})

    def _pad(self, fills: Mapping[str, tuple[TracedFill, ...]]) -> None:
        self.missing -= sum(pad(each, self._memory[name]) for name, each in fills.items())

    def _plan_chunk(self, seq: int, tensors: Received) -> CopyBatch:  # noqa: ARG002 - any of them
        return copies(self.plan, tensors, self._memory.__getitem__)[0]


class AsSent(StagingLayout):
    """Stages chunks as they were sent: one buffer, with one packed chunk after another."""

    def __init__(self, plan: CopyPlan, chunks: Sequence[tuple[TensorMeta, ...]]) -> None:
        super().__init__(plan)
        self._chunks = chunks
        offsets = [packed_offsets(chunk) for chunk in chunks]
        self._begins = [each[:-1] for each in offsets]
        self._sizes_bytes = [each[-1] for each in offsets]
        self.shapes = {_ALL: ((sum(self._sizes_bytes),), torch.uint8)}
        self._buffers: list[torch.Tensor] = []
        self._numel = sum(torch.Size(meta.shape).numel() for chunk in chunks for meta in chunk)
        self._views = ViewCache()
        self._named: tuple[int, dict[str, torch.Tensor]] | None = None  # of the last chunk
        self._found: dict[tuple[str, Region], tuple[int, str, Region]] = {}

    def begin(self, memory: Memory) -> None:
        """Begins another update in this memory, with nothing staged."""
        super().begin(memory)
        if not self._buffers:
            ends = itertools.accumulate(self._sizes_bytes, initial=0)
            self._buffers = [memory[_ALL][begin:end] for begin, end in itertools.pairwise(ends)]

    def discard(self) -> None:
        """Drops views and copies that belong to released memory."""
        super().discard()
        self._buffers = []
        self._named = None
        self._views.clear()

    def buffer_for(self, seq: int) -> ReceivedChunk | None:
        """Returns the chunk's tensors in staging memory; None for a chunk beyond the last."""
        return self._own(seq) if seq < len(self._chunks) else None

    def find(self, target: str, region: Region) -> torch.Tensor | None:
        """Returns elements of a parameter or buffer; None if no staged chunk has them."""
        if not self._found:
            for seq, name, copy in self._copies():
                self._found[copy.target, copy.region] = seq, name, copy.source
        found = self._found.get((target, region))
        if found is None or found[0] not in self._staged:
            return None
        seq, name, source = found
        return part(self._own_by_name(seq)[name], source)

    def into(self, targets: Memory) -> CopyBatch:
        """Prepares the copies of the plan, from each chunk's tensors."""
        own = {name: tensor for seq in range(len(self._chunks)) for name, tensor in self._own(seq)}
        pairs = [
            (part(targets[copy.target], copy.region), part(own[name], copy.source))
            for _, name, copy in self._copies()
        ]
        return CopyBatch([target for target, _ in pairs], [source for _, source in pairs])

    def pad(self, targets: Memory) -> None:
        """Writes the constants of all parameters and buffers, which no chunk brings."""
        for name, fills in self.plan.fills.items():
            pad(fills, targets[name])

    def _start(self) -> None:
        self.missing = self._numel

    def _plan_chunk(self, seq: int, tensors: Received) -> CopyBatch:
        own = self._own_by_name(seq)
        return CopyBatch([own[name] for name, _ in tensors], [tensor for _, tensor in tensors])

    def _own(self, seq: int) -> ReceivedChunk:
        return self._views.get(self._buffers[seq], self._begins[seq], self._chunks[seq])

    def _own_by_name(self, seq: int) -> dict[str, torch.Tensor]:
        if self._named is None or self._named[0] != seq:
            self._named = seq, dict(self._own(seq))
        return self._named[1]

    def _copies(self) -> Iterator[tuple[int, str, TracedCopy]]:
        for seq, chunk in enumerate(self._chunks):
            for meta in chunk:
                for copy in self.plan.copies[meta.name]:
                    yield seq, meta.name, copy
