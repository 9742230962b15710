"""What an update will send, from its source's metadata alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.errors import UsageError
from bus.manifest import Manifest
from bus.messages import WeightChunkMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.manifest import TensorMeta
    from trainer_agent.transfer import Sender


class Plan:
    """The manifest of a source, and how large its chunks are.

    Raises:
        UsageError: the metadata contradicts itself.
    """

    def __init__(self, metas: Sequence[TensorMeta], *, chunk_bytes: int) -> None:
        try:
            self.manifest = Manifest.plan(metas, chunk_bytes=chunk_bytes)
        except ValueError as error:
            raise UsageError(f"source: {error}") from error
        self.metas = metas
        self.chunks = self.manifest.chunks
        self._sizes_bytes = [self.manifest.sizes_bytes(seq) for seq in range(self.chunks)]
        self.size_bytes = sum(map(sum, self._sizes_bytes))

    def room_bytes(self, sender: Sender) -> int:
        """What a sender needs for the largest chunk."""
        return max(map(sender.packed_bytes, self._sizes_bytes))

    def tensors_of(self, seq: int) -> int:
        """How many tensors a chunk has."""
        return len(self.manifest.names[self.manifest.part(seq)])

    def chunk_meta(self, update_id: str, seq: int, handle: bytes) -> WeightChunkMeta:
        """What engines hear of a chunk before it is sent."""
        manifest, part = self.manifest, self.manifest.part(seq)
        return WeightChunkMeta(
            update_id,
            seq,
            manifest.names[part],
            manifest.dtypes[part],
            manifest.shapes[part],
            self._sizes_bytes[seq],
            handle,
        )
