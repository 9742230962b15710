"""Keeps the weights of the last commit in CPU memory, for stale engines.

While a whole update of the model is sent, its tensors are copied into a second block of memory,
which replaces the first at the commit. So a failed update changes nothing, and there are two copies
from the second update on. Other commits (a patch, a draft, an adapter) make the snapshot outdated
until the next whole update of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import bus.log
from trainer_agent._weights.cpu_cache import cpu_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bus._manifest import TensorMeta


class WeightsCopy:
    """Holds a copy of all weights of a model; once filled, it is a ``WeightSource``.

    Args:
        metas: names, dtypes and shapes of the weights.
    """

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._metas = tuple(metas)
        self._buffers = cpu_buffers(metas)

    @property
    def size_bytes(self) -> int:
        """The size of the copy, in bytes."""
        return sum(meta.size_bytes for meta in self._metas)

    def is_for(self, metas: Sequence[TensorMeta]) -> bool:
        """Returns whether the copy has exactly these tensors."""
        return self._metas == tuple(metas)

    def copy_from(self, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copies consecutive tensors of the model into this copy.

        Args:
            first: the index of the first one among all tensors.
        """
        for place, tensor in enumerate(tensors, first):
            self._buffers[place].copy_(tensor)

    def metadata(self) -> Sequence[TensorMeta]:
        """Returns names, dtypes and shapes, in the order of iteration."""
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, room in zip(self._metas, self._buffers, strict=True):
            yield meta.name, room


class Snapshot:
    """Keeps the weights of one trainer's last commit.

    Attributes:
        version: the version of the kept weights; 0 if there are none, or they are outdated.
        kept: the copy of these weights; None before the first.
    """

    def __init__(self) -> None:
        self.version = 0
        self.kept: WeightsCopy | None = None
        self._spare: WeightsCopy | None = None
        self._log = bus.log.logger()

    @property
    def memory_bytes(self) -> int:
        """The memory of all copies of the weights, including the spare one, in bytes."""
        return sum(copy.size_bytes for copy in (self.kept, self._spare) if copy is not None)

    def begin(self, metas: Sequence[TensorMeta]) -> WeightsCopy:
        """Returns memory for a copy of the next update's weights, which ``metas`` describe.

        Allocating the memory may take seconds.
        """
        spare = self._spare
        if spare is None or not spare.is_for(metas):
            self._spare = None
            spare = self._spare = WeightsCopy(metas)
        return spare

    def on_committed(self, version: int, copy: WeightsCopy | None) -> None:
        """Records the commit of ``version``.

        Args:
            copy: a copy of all its weights, from :meth:`begin`; None: they were not copied, so the
                kept weights are outdated.
        """
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
