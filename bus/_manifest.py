"""Defines the manifest of an update: which tensors are sent, in which order and chunks.

This module does not import torch: dtypes are torch's names without ``torch.``.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
INDEX_BYTES: Final = 4  # in a patch: the index of a value in its flattened tensor


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor's metadata: its Hugging Face name, dtype and full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the full tensor, in bytes."""
        return _size_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Manifest:
    """The tensors of an update, in the order of sending, and their division into chunks.

    Attributes:
        names: the tensors' Hugging Face names.
        dtypes: their dtypes, by torch's names.
        shapes: their full shapes.
        chunk_ends: for each chunk, the index after its last tensor. The indexes grow strictly, and
            the last one is the number of tensors.
        counts: in the manifest of a patch, how many elements of each tensor are sent, each with its
            index. Empty: full tensors are sent.
        is_cast: whether the sender has cast tensors to the dtype of the engines' models, and wants
            to know which of them an engine keeps in a wider one. Not a part of the digest.
        is_open: whether more tensors may follow (:meth:`join`). Not a part of the digest.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    chunk_ends: tuple[int, ...]
    counts: tuple[int, ...] = ()
    is_cast: bool = False
    is_open: bool = False

    def __post_init__(self) -> None:
        """Checks that the fields agree.

        Raises:
            ValueError: they don't; the text names the field and the tensor.
        """
        count = len(self.names)
        columns = {
            "dtypes": self.dtypes,
            "shapes": self.shapes,
            "counts": self.counts or self.names,
        }
        for field, column in columns.items():
            if len(column) != count:
                raise ValueError(f"{field}: {len(column)} entries for {count} names")
        if len(set(self.names)) != count:
            twice = next(n for n in self.names if self.names.count(n) > 1)
            raise ValueError(f"names: {twice} appears twice")
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"dtypes: {name} has unknown dtype {dtype!r}")
        ends = (0, *self.chunk_ends)
        if ends[-1] != count or any(b <= a for a, b in pairwise(ends)):
            raise ValueError(f"chunk_ends: must grow and end at {count}, got {self.chunk_ends}")
        # Without counts, full tensors are sent, and there is nothing to compare.
        for name, shape, part in zip(self.names, self.shapes, self.counts, strict=False):
            if part > math.prod(shape):
                raise ValueError(f"counts: {part} elements of {name}, which has {math.prod(shape)}")

    @classmethod
    def plan(cls, tensors: Iterable[TensorMeta], *, chunk_bytes: int) -> Manifest:
        """Divides tensors into chunks, in their order, and returns their manifest.

        Args:
            tensors: names, dtypes and shapes.
            chunk_bytes: the most bytes in one chunk. A larger tensor gets a chunk of its own.

        Raises:
            ValueError: there is no tensor, a name is repeated, or a dtype is unknown.
        """
        metas = list(tensors)
        if not metas:
            raise ValueError("names: an update needs at least one tensor")
        for meta in metas:
            if meta.dtype not in DTYPE_BYTES:
                raise ValueError(f"dtypes: {meta.name} has unknown dtype {meta.dtype!r}")
        ends: list[int] = []
        filled = 0
        for index, meta in enumerate(metas):
            size = meta.size_bytes
            if index and filled + size > chunk_bytes and (not ends or ends[-1] != index):
                ends.append(index)
                filled = 0
            filled += size
        return cls._of(metas, (*ends, len(metas)))

    @classmethod
    def of_patch(cls, tensors: Iterable[TensorMeta], counts: Iterable[int]) -> Manifest:
        """Returns the manifest of a patch, which is sent as one chunk.

        Args:
            tensors: names, dtypes and full shapes of the tensors that the patch changes.
            counts: how many elements of each tensor are sent.

        Raises:
            ValueError: as :meth:`plan`; or a count is missing, or exceeds its tensor's elements.
        """
        metas = list(tensors)
        return cls._of(metas, (len(metas),), tuple(counts))

    @classmethod
    def _of(
        cls, metas: list[TensorMeta], ends: tuple[int, ...], counts: tuple[int, ...] = ()
    ) -> Manifest:
        names, dtypes = tuple(m.name for m in metas), tuple(m.dtype for m in metas)
        return cls(names, dtypes, tuple(m.shape for m in metas), ends, counts)

    def join(self, part: Manifest) -> Manifest:
        """Returns the manifest of these tensors, followed by those of ``part`` in their chunks.

        Raises:
            ValueError: a name occurs in both.
        """
        count = len(self.names)
        return replace(
            self,
            names=self.names + part.names,
            dtypes=self.dtypes + part.dtypes,
            shapes=self.shapes + part.shapes,
            chunk_ends=(*self.chunk_ends, *(count + end for end in part.chunk_ends)),
        )

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.chunk_ends)

    def tensors(self) -> Iterator[TensorMeta]:
        """Returns all tensors, in order."""
        return map(TensorMeta, self.names, self.dtypes, self.shapes)

    def part(self, seq: int) -> slice:
        """Returns the slice of names, dtypes and shapes that belongs to chunk ``seq``."""
        return slice(self.chunk_ends[seq - 1] if seq else 0, self.chunk_ends[seq])

    def chunk(self, seq: int) -> tuple[TensorMeta, ...]:
        """Returns the tensors of chunk ``seq``, in order."""
        part = self.part(seq)
        return tuple(map(TensorMeta, self.names[part], self.dtypes[part], self.shapes[part]))

    def sizes_bytes(self, seq: int) -> tuple[int, ...]:
        """Returns how many bytes of each tensor of chunk ``seq`` are sent."""
        part = self.part(seq)
        if self.counts:
            sent = zip(self.dtypes[part], self.counts[part], strict=True)
            return tuple(count * (DTYPE_BYTES[dtype] + INDEX_BYTES) for dtype, count in sent)
        return tuple(map(_size_bytes, self.shapes[part], self.dtypes[part]))

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of tensors, chunks and counts, in canonical encoding, in hex."""
        fields = (self.names, self.dtypes, self.shapes, self.chunk_ends, self.counts)
        blob = msgspec.msgpack.encode(fields)
        return hashlib.sha256(blob).hexdigest()


# The manifest of an update that brings no tensors: the removal of an adapter (bus._lora).
NO_TENSORS: Final = Manifest((), (), (), ())


def _size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * DTYPE_BYTES[dtype]
