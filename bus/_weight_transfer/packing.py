"""Packs the tensors of a chunk into one buffer, and makes views of them there."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from bus._weight_transfer.formats import LentTensors, M, aligned, encode, transfer_failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bus._manifest import TensorMeta
    from bus._weight_transfer.formats import IpcMemory, ShmMemory

    Lent: TypeAlias = LentTensors[ShmMemory] | LentTensors[IpcMemory]


Tensors: TypeAlias = list[tuple[str, torch.Tensor]]


# Entries after which the cache is emptied: most belong to manifests or buffers of the past.
_MOST_VIEWS: Final = 4096


class ReceivedChunk(list["tuple[str, torch.Tensor]"]):
    """The ``(name, tensor)`` pairs of a received chunk, with fixed places in a buffer.

    The same chunk of the next update lies in the same places. So values derived from the places can
    be kept in :attr:`memo`.

    Attributes:
        metas: names, dtypes and shapes of the tensors, as in the manifest.
        memory: the buffer, as a uint8 tensor of one dimension.
        offsets_bytes: where each tensor begins in the buffer, in bytes.
        memo: values derived from these places, by name.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(
        self,
        tensors: Tensors,
        metas: tuple[TensorMeta, ...],
        memory: torch.Tensor,
        offsets_bytes: Sequence[int],
    ) -> None:
        super().__init__(tensors)
        self.metas = metas
        self.memory = memory
        self.offsets_bytes = tuple(offsets_bytes)
        self.memo: dict[str, Any] = {}

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors without their names."""
        return [tensor for _, tensor in self]

    @cached_property
    def numel(self) -> int:
        """How many elements all tensors have together."""
        return sum(tensor.numel() for tensor in self.tensors)

    def __eq__(self, other: object) -> bool:
        return self is other


class ViewCache:
    """Keeps the views of packed chunks, one set per chunk and buffer.

    Making a view calls torch once per tensor, which would delay a worker's steps. A chunk that
    begins with the same tensor, in the same buffer, replaces the one before. So the cache holds
    the views of one update only.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], ReceivedChunk] = {}

    def get(
        self,
        memory: torch.Tensor,
        offsets_bytes: Sequence[int],
        tensors: tuple[TensorMeta, ...],
    ) -> ReceivedChunk:
        """Returns the tensors of a packed chunk as views of ``memory``.

        Args:
            memory: the buffer, as a uint8 tensor of one dimension.
            offsets_bytes: where each tensor begins, in bytes.
            tensors: names, dtypes and shapes of the tensors.

        Raises:
            EngineError: as :func:`views_of`.
        """
        key = (id(memory), tensors[0].name if tensors else "")
        made = self._made.get(key)
        if made is None or made.metas != tensors or made.offsets_bytes != offsets_bytes:
            if len(self._made) >= _MOST_VIEWS:
                self._made.clear()
            viewed = views_of(memory, offsets_bytes, tensors)
            made = self._made[key] = ReceivedChunk(viewed, tensors, memory, offsets_bytes)
        return made

    def clear(self) -> None:
        """Drops all views. Their buffers can then be freed."""
        self._made.clear()


def packed_offsets(tensors: Iterable[TensorMeta]) -> tuple[int, ...]:
    """Returns where each tensor of a packed chunk begins, and the chunk's size.

    Args:
        tensors: names, dtypes and shapes of the chunk's tensors.

    Returns:
        One offset per tensor and the total size, in bytes.
    """
    sizes = (aligned(meta.size_bytes) for meta in tensors)
    return tuple(itertools.accumulate(sizes, initial=0))


def views_of(
    memory: torch.Tensor, offsets_bytes: Sequence[int], tensors: Sequence[TensorMeta]
) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a packed chunk as views of a buffer, without a copy.

    Args:
        memory: the buffer, as a uint8 tensor of one dimension.
        offsets_bytes: where each tensor begins, in bytes.
        tensors: names, dtypes and shapes of the tensors.

    Returns:
        ``(name, tensor)`` pairs, in order.

    Raises:
        EngineError: code ``transfer_failed``; the number of offsets is wrong, or a tensor ends
            behind the buffer.
    """
    if len(offsets_bytes) != len(tensors):
        raise transfer_failed(f"{len(offsets_bytes)} offsets for {len(tensors)} tensors")
    return [
        (meta.name, _view_of(memory, offset, meta))
        for meta, offset in zip(tensors, offsets_bytes, strict=True)
    ]


def check_broadcast(size_bytes: int, expected_bytes: int, room_bytes: int) -> None:
    """Checks that a packed broadcast is the announced chunk and fits the buffer.

    Args:
        size_bytes: what the sender announced, in bytes.
        expected_bytes: what the manifest's tensors take, in bytes.
        room_bytes: the buffer's size in bytes.

    Raises:
        EngineError: code ``transfer_failed``, with all three sizes.
    """
    if size_bytes != expected_bytes or size_bytes > room_bytes:
        raise transfer_failed(
            f"a broadcast of {size_bytes} bytes for tensors that take {expected_bytes}, "
            f"with room for {room_bytes}"
        )


def _view_of(memory: torch.Tensor, offset_bytes: int, meta: TensorMeta) -> torch.Tensor:
    end = offset_bytes + meta.size_bytes
    if end > memory.numel():
        raise transfer_failed(
            f"{meta.name} ends at byte {end} of {memory.numel()}", tensor=meta.name
        )
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return memory[offset_bytes:end].view(dtype).view(meta.shape)


def lend(tensors: Sequence[torch.Tensor], locate: Callable[[torch.Tensor], tuple[M, int]]) -> bytes:
    """Returns the handle of an unpacked chunk.

    Args:
        tensors: the chunk's tensors, contiguous.
        locate: returns the memory in which a tensor lies, and its offset there in bytes; called
            for tensors with elements.
    """
    places: dict[M, int] = {}
    memory_of: list[int] = []
    offsets: list[int] = []
    for tensor in tensors:
        index = offset = 0
        if tensor.numel():
            memory, offset = locate(tensor)
            index = places.setdefault(memory, len(places))
        memory_of.append(index)
        offsets.append(offset)
    return encode(LentTensors(tuple(places), tuple(memory_of), tuple(offsets)))


def check_lent(lent: Lent, tensors: Sequence[TensorMeta]) -> None:
    """Checks that a chunk's tensors lie within the memory that the trainer shares for it.

    Args:
        lent: the chunk's decoded handle: the shared memory, and each tensor's place in it.
        tensors: names, dtypes and shapes of the chunk's tensors.

    Raises:
        EngineError: code ``transfer_failed``, with the first wrong tensor.
    """
    if not len(lent.memory_of) == len(lent.offsets_bytes) == len(tensors):
        raise transfer_failed(
            f"{len(lent.memory_of)} memories and {len(lent.offsets_bytes)} offsets for "
            f"{len(tensors)} tensors"
        )
    for meta, index, offset in zip(tensors, lent.memory_of, lent.offsets_bytes, strict=True):
        if not meta.size_bytes:
            continue
        if index >= len(lent.memories):
            raise transfer_failed(f"memory {index} of {len(lent.memories)}", tensor=meta.name)
        end, size_bytes = offset + meta.size_bytes, lent.memories[index].size_bytes
        if end > size_bytes:
            raise transfer_failed(
                f"{meta.name} ends at byte {end} of {size_bytes}", tensor=meta.name
            )


def lent_views(
    memories: Sequence[torch.Tensor],
    lent: Lent,
    tensors: Sequence[TensorMeta],
    device: torch.device,
) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a lent chunk as views of mapped memory.

    Args:
        memories: the mapped allocations, as uint8 tensors of one dimension.
        lent: the handle, as :func:`check_lent` has checked it.
        tensors: names, dtypes and shapes of the chunk's tensors.
        device: where tensors without elements are made.

    Returns:
        ``(name, tensor)`` pairs, in order.
    """
    received: list[tuple[str, torch.Tensor]] = []
    for meta, index, offset in zip(tensors, lent.memory_of, lent.offsets_bytes, strict=True):
        if meta.size_bytes:
            received.append((meta.name, _view_of(memories[index], offset, meta)))
        else:
            dtype: torch.dtype = getattr(torch, meta.dtype)
            received.append((meta.name, torch.empty(meta.shape, dtype=dtype, device=device)))
    return received


def pack(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Copies tensors into a buffer, each at a multiple of 64 bytes.

    Args:
        memory: the buffer, as a uint8 tensor of one dimension.
        tensors: of any shape, dtype, strides and device.

    Returns:
        Where each tensor begins, then where the last one ends, rounded up to 64, in bytes.
    """
    offsets = [0]
    for tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        start = offsets[-1]
        room = memory[start : start + size_bytes].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor)
        offsets.append(start + aligned(size_bytes))
    return offsets
