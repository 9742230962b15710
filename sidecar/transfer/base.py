"""What a receiver is, and what receivers share."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import torch

from bus.errors import EngineError
from bus.messages import NackCode
from bus.transfer import aligned, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bus.manifest import TensorMeta
    from bus.transfer import IpcTensors, Place, ShmTensors

    Tensors: TypeAlias = list[tuple[str, torch.Tensor]]

T = TypeVar("T")

# Chunks of so many manifests, buffers and updates lie somewhere that one forgets.
_MOST_VIEWS: Final = 4096


class Receiver(ABC):
    """Fetches chunks from a trainer. One object lives as long as one transport.

    What may block on the other end, must end by itself when that end is gone or silent.

    Attributes:
        room_bytes: how much a packed chunk may take; None: as much as it likes.
        device: where the engine has its weights; set before :meth:`open`. Most receivers bring
            tensors to CPU memory whatever it is.
        owned: what it brings is the caller's own, and stays after :meth:`release`. May change
            with :meth:`open`.
        lasts: until :meth:`release` nothing that becomes of the other end can take the tensors
            away. If not, they are copied as soon as they are there.
        waits: :meth:`receive` waits for the other end, or copies.
        collective: :meth:`receive` waits for others, who all have their part in it. It may be
            closed meanwhile by another thread, and is opened anew then.
        launches: :meth:`launch` does what there is to do; who waits, waits for the device.
        depth: so many chunks may be received before the first of them is released; with more than
            one, :meth:`receive` is called in a thread of its own, and so it is of a ``collective``.
            May change with :meth:`open`.
    """

    room_bytes: int | None = None
    device: torch.device = torch.device("cpu")
    owned: bool = False
    lasts: bool = True
    waits: bool = True
    collective: bool = False
    launches: bool = False
    depth: int = 1

    @abstractmethod
    def open(self, params: bytes, place: Place) -> None:
        """Reach the other end; a second call replaces the transport.

        Args:
            params: what the sender's ``open`` returned.
            place: whose end this is, for a backend with collectives.

        Raises:
            EngineError: code ``transfer_failed``.
        """

    def launch(
        self,
        tensors: tuple[TensorMeta, ...],
        handle: bytes,
        into: Delivered | None = None,  # noqa: ARG002 - for who can
    ) -> Callable[[], Tensors]:
        """Begin to fetch one chunk, without a wait for the other end; what comes back, called once,
        in any thread, waits. So the next one can be under way before this one is there. Of GPUs,
        :attr:`device` is the current one.

        Args:
            into: these tensors in memory of the weights' device, as a packed chunk has them: a
                receiver that can have it there, without a copy, does, and returns them.

        Raises:
            EngineError: code ``transfer_failed``; nothing is held then.
        """
        return lambda: self.receive(tensors, handle)

    @abstractmethod
    def receive(self, tensors: tuple[TensorMeta, ...], handle: bytes) -> Tensors:
        """Fetch one chunk; the tensors are valid until :meth:`release`, or for ever if they are
        :attr:`owned`.

        Raises:
            EngineError: code ``transfer_failed``; nothing is held then.
        """

    def receive_into(
        self,
        tensors: tuple[TensorMeta, ...],  # noqa: ARG002 - for who can
        handle: bytes,  # noqa: ARG002
        into: Delivered,  # noqa: ARG002
    ) -> bool:
        """As :meth:`receive`, but into these tensors in memory of the weights' device, with one
        copy, which has been made when this returns. Returns whether this receiver has done so; if
        not, nothing has happened.

        Raises:
            EngineError: code ``transfer_failed``; nothing is held then.
        """
        return False

    def release(self) -> None:  # noqa: B027 - most have nothing to do
        """The tensors of the chunk that was received first are no longer used."""

    @abstractmethod
    def close(self) -> None:
        """Let the transport go."""


class Delivered(list["tuple[str, torch.Tensor]"]):
    """A chunk's tensors, which lie where those of the same chunk will lie in the next update.

    Attributes:
        announced: the chunk, as the manifest has it.
        memory: the buffer that they lie in, as bytes.
        offsets_bytes: where each begins there.
        memo: what was derived of where they lie.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(
        self,
        tensors: Tensors,
        announced: tuple[TensorMeta, ...],
        memory: torch.Tensor,
        offsets_bytes: Sequence[int],
    ) -> None:
        super().__init__(tensors)
        self.announced = announced
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


class Views:
    """Of the tensors of packed chunks, made once for each chunk and buffer, as long as these are
    the same objects, wherever the buffer's memory is: a call into torch for each tensor is what a
    worker has no time for while it makes steps."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Delivered] = {}

    def of(
        self,
        memory: torch.Tensor,
        offsets_bytes: Sequence[int],
        tensors: tuple[TensorMeta, ...],
    ) -> Delivered:
        """As :func:`views_of`."""
        key = (id(memory), id(tensors))
        made = self._made.get(key)
        if made is None or made.announced is not tensors or made.offsets_bytes != offsets_bytes:
            if len(self._made) >= _MOST_VIEWS:
                self._made.clear()
            viewed = views_of(memory, offsets_bytes, tensors)
            made = self._made[key] = Delivered(viewed, tensors, memory, offsets_bytes)
        return made

    def clear(self) -> None:
        """The buffers go."""
        self._made.clear()


def decoded(blob: bytes, type_: type[T]) -> T:
    """What a sender's blob says.

    Raises:
        EngineError: code ``transfer_failed``, with the field that is wrong.
    """
    try:
        return decode(blob, type_)
    except ValueError as error:
        raise transfer_failed(str(error)) from error


def transfer_failed(detail: str, *, tensor: str = "") -> EngineError:
    """The error of a transport."""
    return EngineError(detail, code=NackCode.TRANSFER_FAILED, tensor=tensor)


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
