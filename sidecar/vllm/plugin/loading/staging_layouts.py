"""How an update lies in the memory that it is staged in.

============  ============================  ================================================
              room for                      when
============  ============================  ================================================
:class:`AsSent`    each chunk, as it is packed   the worker takes all of each tensor, and has its
                                            weights as they are loaded
:class:`ByTarget`  each target of the copy plan  else: it takes shards, casts, or repacks layers
============  ============================  ================================================

As it is sent, a chunk can be received straight into its room: nothing is copied before the swap,
while the worker makes steps. By target, memory has no more than this worker's part.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch

from bus.weight_transfer.packing import ReceivedChunk, ViewCache, packed_offsets
from sidecar.vllm.plugin.loading.copy_plan import CopyBatch, part
from sidecar.vllm.plugin.loading.plan_runner import copies, pad

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bus.manifest import TensorMeta
    from sidecar.vllm.plugin.loading.copy_plan import CopyPlan
    from sidecar.vllm.plugin.loading.loader_trace import Region, TracedCopy
    from sidecar.vllm.plugin.loading.plan_runner import Received
    from sidecar.vllm.plugin.loading.staging_buffers import Shapes

    Memory = Mapping[str, torch.Tensor]


_ALL: Final = "all"  # the one memory's name


class StagingLayout(ABC):
    """Lays out the updates that have one manifest.

    Attributes:
        plan: says where each element goes.
        shapes: of the memory that the layout takes.
        missing: how many elements are not staged yet.
    """

    shapes: Shapes

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        self.missing = 0
        self._memory: Memory = {}
        self._staged: set[int] = set()
        # Of chunks that will come again as they did.
        self._planned: WeakKeyDictionary[ReceivedChunk, CopyBatch] = WeakKeyDictionary()

    def begin(self, memory: Memory) -> None:
        """Begin another update in this memory; nothing of it is staged."""
        if memory is not self._memory:
            self.discard()
            self._memory = memory
        self._staged.clear()
        self._start()

    def stage(self, seq: int, tensors: Received) -> bool:
        """Put a chunk into the memory; return whether it was copied.

        Raises:
            KeyError: a tensor that the manifest doesn't have.
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

    def discard(self) -> None:
        """Drop what belongs to memory that is gone."""
        self._memory = {}
        self._planned.clear()

    def buffer_for(self, seq: int) -> ReceivedChunk | None:  # noqa: ARG002 - not every layout has one
        """Return the chunk's tensors, if it may be received as it is packed."""
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
        """Return what is staged for a part of a target; None: no chunk was copied to it."""

    @abstractmethod
    def into(self, targets: Memory) -> CopyBatch:
        """Return the copies that move all staged weights into ``targets``.

        Args:
            targets: tensors with the names and shapes of the copy plan's targets.
        """

    def pad(self, targets: Memory) -> None:  # noqa: B027 - not every layout has to
        """Fill what is the same in all updates, and no part of :meth:`into`."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _plan_chunk(self, seq: int, tensors: Received) -> CopyBatch: ...


class ByTarget(StagingLayout):
    """Each target of the plan has a tensor of its shape."""

    def __init__(self, plan: CopyPlan) -> None:
        super().__init__(plan)
        self.shapes = {name: (each.shape, each.dtype) for name, each in plan.targets.items()}

    def find(self, target: str, region: Region) -> torch.Tensor | None:
        """Return what is staged for a part of a target; None: nothing."""
        there = self._memory.get(target)
        return None if there is None else part(there, region)

    def into(self, targets: Memory) -> CopyBatch:
        """Return the copies that move all staged weights into ``targets``.

        Args:
            targets: tensors with the names and shapes of the copy plan's targets.
        """
        return CopyBatch(list(targets.values()), [self._memory[name] for name in targets])

    def _start(self) -> None:
        self.missing = sum(each.numel() for each in self._memory.values())
        self.missing -= sum(pad(self.plan, name, self._memory[name]) for name in self.plan.fills)

    def _plan_chunk(self, seq: int, tensors: Received) -> CopyBatch:  # noqa: ARG002 - any of them
        return copies(self.plan, tensors, self._memory.__getitem__)[0]


class AsSent(StagingLayout):
    """Keeps chunks one behind the other in one memory, each as it is packed."""

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
        self._found: dict[tuple[str, Region], tuple[int, str, Region]] = {}

    def begin(self, memory: Memory) -> None:
        """Begin another update in this memory; nothing of it is staged."""
        super().begin(memory)
        if not self._buffers:
            ends = itertools.accumulate(self._sizes_bytes, initial=0)
            self._buffers = [memory[_ALL][begin:end] for begin, end in itertools.pairwise(ends)]

    def discard(self) -> None:
        """Drop what belongs to memory that is gone."""
        super().discard()
        self._buffers = []
        self._views.clear()

    def buffer_for(self, seq: int) -> ReceivedChunk | None:
        """Return the chunk's tensors in the memory."""
        return self._own(seq) if seq < len(self._chunks) else None

    def find(self, target: str, region: Region) -> torch.Tensor | None:
        """Return what is staged for a part of a target; None: nothing."""
        if not self._found:
            for seq, name, copy in self._copies():
                self._found[copy.target, copy.region] = seq, name, copy.source
        found = self._found.get((target, region))
        if found is None or found[0] not in self._staged:
            return None
        seq, name, source = found
        return part(dict(self._own(seq))[name], source)

    def into(self, targets: Memory) -> CopyBatch:
        """Return the copies that move all staged weights into ``targets``.

        Args:
            targets: tensors with the names and shapes of the copy plan's targets.
        """
        own = {name: tensor for seq in range(len(self._chunks)) for name, tensor in self._own(seq)}
        pairs = [
            (part(targets[copy.target], copy.region), part(own[name], copy.source))
            for _, name, copy in self._copies()
        ]
        return CopyBatch([target for target, _ in pairs], [source for _, source in pairs])

    def pad(self, targets: Memory) -> None:
        """Fill the padding of the targets."""
        for name in self.plan.fills:
            pad(self.plan, name, targets[name])

    def _start(self) -> None:
        self.missing = self._numel

    def _plan_chunk(self, seq: int, tensors: Received) -> CopyBatch:
        own = dict(self._own(seq))
        return CopyBatch([own[name] for name, _ in tensors], [tensor for _, tensor in tensors])

    def _own(self, seq: int) -> ReceivedChunk:
        return self._views.get(self._buffers[seq], self._begins[seq], self._chunks[seq])

    def _copies(self) -> Iterator[tuple[int, str, TracedCopy]]:
        for seq, chunk in enumerate(self._chunks):
            for meta in chunk:
                for copy in self.plan.copies[meta.name]:
                    yield seq, meta.name, copy
