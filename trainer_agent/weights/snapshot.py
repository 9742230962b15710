"""The weights of the last update that was committed, in CPU memory: what engines that are behind
catch up from.

A whole update of the model is copied chunk by chunk, as it is packed, into memory beside that of
the last one, and takes its place when it is committed. So an update that fails spoils nothing; and
from the second one on there are two copies. What else is committed (a patch, a draft, an adapter)
gives a version of which no copy is kept: the snapshot is outdated until the next whole update of
the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import bus.log
from trainer_agent.weights.cpu_cache import cpu_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bus.manifest import TensorMeta


class WeightsCopy:
    """Memory for all of a model's weights; a :class:`trainer_agent.weights.source.WeightSource`
    once it
    is filled."""

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._metas = tuple(metas)
        self._buffers = cpu_buffers(metas)

    @property
    def size_bytes(self) -> int:
        return sum(meta.size_bytes for meta in self._metas)

    def is_for(self, metas: Sequence[TensorMeta]) -> bool:
        """Whether such tensors have room here."""
        return self._metas == tuple(metas)

    def copy_from(self, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy these tensors, of which ``first`` is the number of the first."""
        for place, tensor in enumerate(tensors, first):
            self._buffers[place].copy_(tensor)

    def metadata(self) -> Sequence[TensorMeta]:
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, room in zip(self._metas, self._buffers, strict=True):
            yield meta.name, room


class Snapshot:
    """One trainer's.

    Attributes:
        version: whose weights it has; 0: none.
        kept: these.
    """

    def __init__(self) -> None:
        self.version = 0
        self.kept: WeightsCopy | None = None
        self._spare: WeightsCopy | None = None
        self._log = bus.log.logger()

    @property
    def memory_bytes(self) -> int:
        """Of all copies."""
        return sum(copy.size_bytes for copy in (self.kept, self._spare) if copy is not None)

    def begin(self, metas: Sequence[TensorMeta]) -> WeightsCopy:
        """Memory for the next update's weights, beside those that are kept. May take its time."""
        spare = self._spare
        if spare is None or not spare.is_for(metas):
            self._spare = None
            spare = self._spare = WeightsCopy(metas)
        return spare

    def on_committed(self, version: int, copy: WeightsCopy | None) -> None:
        """An update was. ``copy`` has its weights, all of them; None: nobody has copied it."""
        if copy is None:
            if self.version:
                fields = {"version": self.version, "outdated_by": version}
                self._log.info("snapshot_outdated", **fields)
            self.version = 0
            return
        old, self.kept, self.version = self.kept, copy, version
        self._spare = old if old is not None and old.is_for(tuple(copy.metadata())) else None
        self._log.info(
            "snapshot_kept", version=version, size_bytes=copy.size_bytes, bytes=self.memory_bytes
        )
