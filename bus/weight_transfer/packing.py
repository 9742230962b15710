"""Packs the tensors of a chunk into one buffer, and makes views of them there."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from bus.weight_transfer.formats import aligned, transfer_failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bus.manifest import TensorMeta
    from bus.weight_transfer.formats import IpcTensors, ShmTensors


Tensors: TypeAlias = list[tuple[str, torch.Tensor]]


# Chunks of so many manifests, buffers and updates lie somewhere that one forgets.
_MOST_VIEWS: Final = 4096


class ReceivedChunk(list["tuple[str, torch.Tensor]"]):
    """A chunk's tensors, which lie where those of the same chunk will lie in the next update.

    Attributes:
        metas: the chunk's tensors, as the manifest has them.
        memory: the buffer that they lie in, as bytes.
        offsets_bytes: where each begins there.
        memo: what was derived of where they lie.
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
        """Without their names."""
        return [tensor for _, tensor in self]

    @cached_property
    def numel(self) -> int:
        """How many elements all of them have."""
        return sum(tensor.numel() for tensor in self.tensors)

    def __eq__(self, other: object) -> bool:
        return self is other


class ViewCache:
    """Of the tensors of packed chunks, made once for each chunk and buffer, wherever the buffer's
    memory is: a call into torch for each tensor is what a worker has no time for while it makes
    steps. A chunk that begins with the same tensor takes the place of the one before, so that
    updates without end keep the views of one."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], ReceivedChunk] = {}

    def get(
        self,
        memory: torch.Tensor,
        offsets_bytes: Sequence[int],
        tensors: tuple[TensorMeta, ...],
    ) -> ReceivedChunk:
        """As :func:`views_of`."""
        key = (id(memory), tensors[0].name if tensors else "")
        made = self._made.get(key)
        if made is None or made.metas != tensors or made.offsets_bytes != offsets_bytes:
            if len(self._made) >= _MOST_VIEWS:
                self._made.clear()
            viewed = views_of(memory, offsets_bytes, tensors)
            made = self._made[key] = ReceivedChunk(viewed, tensors, memory, offsets_bytes)
        return made

    def clear(self) -> None:
        """The buffers go."""
        self._made.clear()


def packed_offsets(tensors: Iterable[TensorMeta]) -> tuple[int, ...]:
    """Where each tensor of a packed chunk begins, in bytes; and where the last one's room ends."""
    sizes = (aligned(meta.size_bytes) for meta in tensors)
    return tuple(itertools.accumulate(sizes, initial=0))


def views_of(
    memory: torch.Tensor, offsets_bytes: Sequence[int], tensors: Sequence[TensorMeta]
) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a packed chunk, where their offsets say, without a copy.

    Raises:
        EngineError: code ``transfer_failed``: another number of offsets, or one ends behind the
            buffer.
    """
    if len(offsets_bytes) != len(tensors):
        raise transfer_failed(f"{len(offsets_bytes)} offsets for {len(tensors)} tensors")
    return [
        (meta.name, view_of(memory, offset, meta))
        for meta, offset in zip(tensors, offsets_bytes, strict=True)
    ]


def check_broadcast(size_bytes: int, expected_bytes: int, room_bytes: int) -> None:
    """A packed broadcast is of the chunk that was announced, and fits.

    Raises:
        EngineError: code ``transfer_failed``, with all three sizes.
    """
    if size_bytes != expected_bytes or size_bytes > room_bytes:
        raise transfer_failed(
            f"a broadcast of {size_bytes} bytes for tensors that take {expected_bytes}, "
            f"with room for {room_bytes}"
        )


def view_of(memory: torch.Tensor, offset_bytes: int, meta: TensorMeta) -> torch.Tensor:
    """A tensor in a buffer of bytes, without a copy.

    Raises:
        EngineError: code ``transfer_failed``: it would end behind the buffer.
    """
    end = offset_bytes + meta.size_bytes
    if end > memory.numel():
        raise transfer_failed(
            f"{meta.name} ends at byte {end} of {memory.numel()}", tensor=meta.name
        )
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return memory[offset_bytes:end].view(dtype).view(meta.shape)


def check_lent(lent: IpcTensors | ShmTensors, tensors: Sequence[TensorMeta]) -> None:
    """A handle says for each tensor of the chunk where it lies, and all of it lies there.

    Raises:
        EngineError: code ``transfer_failed``, with the first tensor that doesn't.
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
    lent: IpcTensors | ShmTensors,
    tensors: Sequence[TensorMeta],
    device: torch.device,
) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a lent chunk, as :func:`check_lent` has passed it, in its ``memories``."""
    received: list[tuple[str, torch.Tensor]] = []
    for meta, index, offset in zip(tensors, lent.memory_of, lent.offsets_bytes, strict=True):
        if meta.size_bytes:
            received.append((meta.name, view_of(memories[index], offset, meta)))
        else:
            dtype: torch.dtype = getattr(torch, meta.dtype)
            received.append((meta.name, torch.empty(meta.shape, dtype=dtype, device=device)))
    return received


def pack(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Copy tensors into a buffer of bytes, each at a multiple of 64; return where each begins,
    and where the last one's room ends."""
    offsets = [0]
    for tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        start = offsets[-1]
        room = memory[start : start + size_bytes].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor)
        offsets.append(start + aligned(size_bytes))
    return offsets
