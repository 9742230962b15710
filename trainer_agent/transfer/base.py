"""What a sender is, and what senders share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from bus.errors import UsageError
from bus.transfer import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.transfer import World

DOUBLE: Final = 2  # buffers: one is filled while the other is emptied


class Sender(ABC):
    """Makes tensors reachable for the engines. One object lives as long as one transport.

    The agent calls :meth:`open`, has every engine open its end with the returned params, and
    :meth:`meet` beside that; then :meth:`opened`. Each chunk is :meth:`put`, announced to the
    engines, and :meth:`transfer`\\ red while they receive it; never are there more than
    :attr:`depth` chunks that no :meth:`taken` has answered, or, of a collective, that have been
    put and not transferred. The first ones are put while engines still generate.

    :meth:`open`, :meth:`meet`, :meth:`put` and :meth:`transfer` run in threads and may block,
    each one at a time, a put beside the transfer of the chunk before; where they are
    :meth:`queue`\\ d, in order, several transfers wait side by side. What waits for engines must
    end by itself when one is gone or silent.

    Attributes:
        depth: how many chunks it has room for at a time; set before :meth:`open`.
        packed: chunks are packed into buffers; else tensors are sent from where they are. Set
            before :meth:`open`, and only where :attr:`sends_unpacked`.
        device: the GPU that it sends from, such as ``cuda:0``, if it is one that does; empty:
            the current one of the thread that opens it. Set before :meth:`open`.
        sends_unpacked: it can do without packing.
        queues: it can :meth:`queue` a chunk while others travel.
        collective: engines and sender receive a chunk together, in a communicator that whoever
            comes or goes makes useless.
        verifies: what engines receive is, bit by bit, what was put.
    """

    depth: int = DOUBLE
    packed: bool = True
    device: str = ""
    sends_unpacked: ClassVar[bool] = False
    queues: ClassVar[bool] = False
    collective: ClassVar[bool] = False
    verifies: ClassVar[bool] = True

    @abstractmethod
    def open(self, chunk_bytes: int, world: World) -> bytes:
        """Make room for chunks of up to ``chunk_bytes``; return the engines' params."""

    def meet(self) -> None:  # noqa: B027 - only collectives have somebody to meet
        """Wait until all ends of the communicator are there."""

    def opened(self) -> None:  # noqa: B027 - as above
        """Every engine has opened its end."""

    @abstractmethod
    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        """Offer one chunk; return the handle for its WEIGHT_CHUNK_META."""

    def queue(self, seq: int) -> None:  # noqa: B027 - as above
        """Have the chunk sent when those before it are, without a wait for them."""

    def transfer(self, seq: int) -> None:  # noqa: B027 - as above
        """Send the chunk that was put, if it is not queued; return when it is sent. Engines receive
        it meanwhile."""

    def taken(self, seq: int) -> None:  # noqa: B027 - as above
        """Every engine has taken the chunk; its room may be used again."""

    def packed_bytes(self, sizes_bytes: Sequence[int]) -> int:
        """Room that tensors of these sizes take in one chunk. Unpacked they take none; the one
        byte has the transport opened all the same."""
        return sum(map(aligned, sizes_bytes)) if self.packed else 1

    @abstractmethod
    def close(self) -> None:
        """Let everything go. It also ends a :meth:`meet` that waits in another thread."""


def current_gpu() -> str:
    """The GPU that this thread has chosen, such as ``cuda:1``; empty, as long as there is none in
    use. New threads begin with the first, whatever others chose: so it is asked in the user's."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return f"cuda:{torch.cuda.current_device()}" if in_use else ""


def gpu(device: str) -> torch.device:
    """The GPU of that name, with its number; for an empty one, this thread's.

    Raises:
        UsageError: it is no GPU.
    """
    named = torch.device(device or "cuda")
    if named.type != "cuda":
        raise UsageError(f"device={device!r}: name a GPU, such as cuda:0")
    return torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)


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
