"""The contracts of a backend's two ends: :class:`Sender` and :class:`Receiver`.

A sender lives in the trainer. A receiver lives where the tensors are needed: in the embedded
engine, or inside a vLLM worker. It fetches bytes and knows no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from bus.weight_transfer.formats import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bus.manifest import TensorMeta
    from bus.weight_transfer.allocation import RankAssignment, World
    from bus.weight_transfer.packing import ReceivedChunk, Tensors

DOUBLE: Final = 2  # buffers: one is filled while the other is emptied


class Sender(ABC):
    """Makes tensors reachable for the engines. One object lives as long as one transport.

    The agent calls :meth:`open`, has every engine open its end with the returned params, and
    :meth:`meet` beside that; then :meth:`on_opened`. Each chunk is :meth:`put`, announced to the
    engines, and :meth:`transfer`\\ red while they receive it. At most :attr:`prefetch_depth` chunks
    have no :meth:`on_taken` yet, or, of a collective, have been put and not transferred. The first
    ones are put while engines still generate.

    :meth:`open`, :meth:`meet`, :meth:`put` and :meth:`transfer` run in threads and may block,
    each one at a time, a put beside the transfer of the chunk before; where they are
    :meth:`queue`\\ d, in order, several transfers wait side by side. What waits for engines must
    end by itself when one is gone or silent.

    Attributes:
        prefetch_depth: how many chunks it has room for at a time; set before :meth:`open`.
        packed: chunks are packed into buffers; else tensors are sent from where they are. Set
            before :meth:`open`, and only where :attr:`can_send_unpacked`.
        device: the GPU that it sends from, such as ``cuda:0``, if it is one that does; empty:
            the current one of the thread that opens it. Set before :meth:`open`.
        can_send_unpacked: it can do without packing.
        can_queue: it can :meth:`queue` a chunk while others travel.
        is_collective: engines and sender receive a chunk together, in a communicator that whoever
            comes or goes makes useless.
        is_bit_exact: what engines receive is, bit by bit, what was put.
    """

    prefetch_depth: int = DOUBLE
    packed: bool = True
    device: str = ""
    can_send_unpacked: ClassVar[bool] = False
    can_queue: ClassVar[bool] = False
    is_collective: ClassVar[bool] = False
    is_bit_exact: ClassVar[bool] = True

    @abstractmethod
    def open(self, chunk_bytes: int, world: World) -> bytes:
        """Make room for chunks of up to ``chunk_bytes``; return the engines' params."""

    def meet(self) -> None:  # noqa: B027 - only collectives have somebody to meet
        """Wait until all ends of the communicator are there."""

    def on_opened(self) -> None:  # noqa: B027 - as above
        """Every engine has opened its end."""

    @abstractmethod
    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        """Offer one chunk; return the handle for its WEIGHT_CHUNK_META."""

    def queue(self, seq: int) -> None:  # noqa: B027 - as above
        """Have the chunk sent when those before it are, without a wait for them."""

    def transfer(self, seq: int) -> None:  # noqa: B027 - as above
        """Send the chunk that was put, if it is not queued; return when it is sent. Engines receive
        it meanwhile."""

    def on_taken(self, seq: int) -> None:  # noqa: B027 - as above
        """Every engine has taken the chunk; its room may be used again."""

    def packed_bytes(self, sizes_bytes: Sequence[int]) -> int:
        """Room that tensors of these sizes take in one chunk. Unpacked they take none; the one
        byte has the transport opened all the same."""
        return sum(map(aligned, sizes_bytes)) if self.packed else 1

    @abstractmethod
    def close(self) -> None:
        """Let everything go. It also ends a :meth:`meet` that waits in another thread."""


class Receiver(ABC):
    """Fetches chunks from a trainer. One object lives as long as one transport.

    What may block on the other end, must end by itself when that end is gone or silent.

    Attributes:
        room_bytes: how much a packed chunk may take; None: as much as it likes.
        device: where the engine has its weights; set before :meth:`open`. Most receivers bring
            tensors to CPU memory whatever it is.
        is_owned: what it brings is the caller's own, and stays after :meth:`release`. May change
            with :meth:`open`.
        is_lasting: until :meth:`release` nothing that becomes of the other end can take the tensors
            away. If not, they are copied as soon as they are there.
        is_blocking: :meth:`receive` waits for the other end, or copies.
        is_collective: :meth:`receive` waits for others, who all have their part in it. It may be
            closed meanwhile by another thread, and is opened anew then.
        can_launch: :meth:`launch` does what there is to do; who waits, waits for the device.
        prefetch_depth: so many chunks may be received before the first of them is released. With
            more than one, or if the receiver :attr:`is_collective`, :meth:`receive` is called in a
            thread of its own. May change with :meth:`open`.
    """

    room_bytes: int | None = None
    device: torch.device = torch.device("cpu")
    is_owned: bool = False
    is_lasting: bool = True
    is_blocking: bool = True
    is_collective: bool = False
    can_launch: bool = False
    prefetch_depth: int = 1

    @abstractmethod
    def open(self, params: bytes, place: RankAssignment) -> None:
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
        into: ReceivedChunk | None = None,  # noqa: ARG002 - for who can
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
        :attr:`is_owned`.

        Raises:
            EngineError: code ``transfer_failed``; nothing is held then.
        """

    def receive_into(
        self,
        tensors: tuple[TensorMeta, ...],  # noqa: ARG002 - for who can
        handle: bytes,  # noqa: ARG002
        into: ReceivedChunk,  # noqa: ARG002
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
