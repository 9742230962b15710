"""Plans the chunks of an update from the tensors' metadata."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import bus.log
from bus._manifest import Manifest
from bus._weight_transfer.checksum import inspect
from bus.errors import NonFiniteWeights, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from bus._manifest import TensorMeta
    from bus._weight_transfer.base import Sender
    from bus.messages import Verify


class UpdatePlan:
    """The tensors that an update sends, and their chunks.

    Args:
        metas: the tensors' names, dtypes and full shapes, in the order of sending.
        manifest: the same tensors, in chunks.
        base: the version to which a patch is applied; 0 for a source.

    Attributes:
        chunks: how many chunks there are.
        size_bytes: how many bytes are sent.
        check_finite: whether to search all weights for NaN and Inf, and to fail if there are any.
        nonfinite: the first tensor in which NaN or Inf was found; empty if none was.
    """

    def __init__(self, metas: Sequence[TensorMeta], manifest: Manifest, *, base: int = 0) -> None:
        self.metas = metas
        self.manifest = manifest
        self.base = base
        self.check_finite = False
        self.nonfinite = ""
        self.chunks = manifest.chunks
        self._sizes_bytes = [manifest.sizes_bytes(seq) for seq in range(self.chunks)]
        self.size_bytes = sum(map(sum, self._sizes_bytes))

    @classmethod
    def of_source(cls, metas: Sequence[TensorMeta], *, chunk_bytes: int) -> Self:
        """Returns the plan for all tensors of a source.

        Args:
            metas: names, dtypes and full shapes, in the order of sending.
            chunk_bytes: the most bytes in one chunk. A larger tensor gets a chunk of its own.

        Raises:
            UsageError: the metadata is contradictory, such as two tensors of one name.
        """
        try:
            return cls(metas, Manifest.plan(metas, chunk_bytes=chunk_bytes))
        except ValueError as error:
            raise UsageError(f"source: {error}") from error

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[TensorMeta]], *, is_open: bool) -> Self:
        """Returns the plan of tensors that are sent part by part, each in one chunk.

        Args:
            parts: names, dtypes and full shapes of each part's tensors, in the order of sending.
            is_open: whether more parts may follow.

        Raises:
            UsageError: as :meth:`of_source`.
        """
        metas = [meta for part in parts for meta in part]
        ends = tuple(itertools.accumulate(map(len, parts)))
        try:
            whole = Manifest.plan(metas, chunk_bytes=sys.maxsize)
            return cls(metas, replace(whole, chunk_ends=ends, is_open=is_open))
        except ValueError as error:
            raise UsageError(f"update_info: {error}") from error

    @classmethod
    def of_patch(cls, metas: Sequence[TensorMeta], counts: Sequence[int], *, base: int) -> Self:
        """Returns the plan for a patch, which is sent as one chunk.

        Args:
            metas: the tensors that the patch changes, with their full shapes.
            counts: how many elements of each tensor it changes.
            base: the version to which it is applied.

        Raises:
            UsageError: a tensor occurs twice, or has fewer elements than its count.
        """
        try:
            return cls(metas, Manifest.of_patch(metas, counts), base=base)
        except ValueError as error:
            raise UsageError(f"patches: {error}") from error

    def join(self, part: UpdatePlan) -> UpdatePlan:
        """Returns the plan of these tensors, followed by those of ``part``.

        Raises:
            UsageError: a tensor occurs in both.
        """
        try:
            return UpdatePlan([*self.metas, *part.metas], self.manifest.join(part.manifest))
        except ValueError as error:
            raise UsageError(f"update_info: {error}") from error

    def buffer_bytes(self, sender: Sender) -> int:
        """Returns the size of the buffer that a sender needs for the largest chunk."""
        return max(map(sender.packed_bytes, self._sizes_bytes))

    def tensor_count(self, seq: int) -> int:
        """Returns how many tensors a chunk has."""
        return len(self.manifest.names[self.manifest.part(seq)])

    def sums(self, seq: int, tensors: Sequence[torch.Tensor], verify: Verify) -> tuple[int, ...]:
        """Returns a chunk's checksums, and searches the chunk for NaN and Inf.

        Args:
            seq: the number of the chunk.
            tensors: the chunk's tensors.
            verify: how much of each tensor the checksums cover.

        Raises:
            NonFiniteWeights: the chunk has NaN or Inf, and ``check_finite`` is set.
        """
        sums, place = inspect(tensors, verify, check_finite=self.check_finite)
        if place is not None:
            self.nonfinite = self.nonfinite or self.manifest.names[self.manifest.part(seq)][place]
            if self.check_finite:
                raise NonFiniteWeights(self.nonfinite)
        return sums

    def warn_of_nonfinite(self, update_id: str) -> None:
        """Logs a warning before the commit if NaN or Inf was found."""
        if self.nonfinite:
            bus.log.logger().warning(
                "weights_not_finite",
                update_id=update_id,
                tensor=self.nonfinite,
                hint="engines will serve NaN or Inf; check_finite=True refuses such an update",
            )
