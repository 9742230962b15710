"""The contracts of a backend's two ends: :class:`Sender` and :class:`Receiver`.

A sender lives in the trainer. A receiver lives where the tensors are needed: in the embedded
engine, or in a vLLM worker. A receiver only fetches bytes, and depends on no model.
docs/extending.md adds a backend step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from bus._weight_transfer.formats import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bus._manifest import TensorMeta
    from bus._weight_transfer.allocation import RankAssignment, World
    from bus._weight_transfer.packing import ReceivedChunk, Tensors

DOUBLE: Final = 2  # one buffer is filled while the other is read


class Sender(ABC):
    """The trainer's end of a backend. A second :meth:`open` replaces the transport.

    The agent calls the methods in this order:

    1. :meth:`open`. Every engine opens its end with the returned params.
    2. :meth:`meet`, while the engines open, then :meth:`on_opened`.
    3. For each chunk: :meth:`put`. The agent announces the chunk to the engines.
       :meth:`transfer` sends the chunk while they receive it. :meth:`on_taken` follows.
    4. :meth:`close`.

    At most :attr:`prefetch_depth` chunks are in flight. A chunk is in flight from :meth:`put` to
    :meth:`on_taken`; over a collective, to the end of :meth:`transfer`. The first chunks are put
    while engines still generate.

    :meth:`open`, :meth:`meet`, :meth:`put` and :meth:`transfer` run in threads and may block. Each
    runs once at a time, but a put may run beside the transfer of the chunk before, and several
    :meth:`transfer` may wait for queued chunks (:meth:`queue`). A wait for engines must end by
    itself if an engine is gone or silent.

    Attributes:
        prefetch_depth: how many chunks may be in flight. Set before :meth:`open`.
        packed: whether chunks are packed into buffers. Otherwise tensors are sent from where they
            are. Set before :meth:`open`, and only if :attr:`can_send_unpacked`.
        device: the GPU to send from, such as ``cuda:0``. Empty: the current one of the thread that
            calls :meth:`open`. Set before :meth:`open`.
        can_send_unpacked: whether ``packed=False`` is supported.
        can_queue: whether :meth:`queue` is supported.
        is_collective: whether sender and engines transfer a chunk together, in a communicator. The
            transport must be opened again whenever an engine joins or leaves.
        is_bit_exact: whether engines receive exactly the bits that were put. Otherwise checksums
            are not compared.
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
        """Allocates memory for chunks and returns what the engines need to open their end.

        Args:
            chunk_bytes: size of the largest chunk, as :meth:`packed_bytes` counts, in bytes.
            world: the communicator, of which this end is rank 0.

        Returns:
            The params for :meth:`Receiver.open`, at most ``MAX_BLOB_BYTES``.

        Raises:
            WavebusError: no memory for chunks, or no store. The text says what to lower.
            UsageError: an option, such as :attr:`device`, is wrong.
        """

    def meet(self) -> None:  # noqa: B027 - only collectives meet
        """Waits until all ends of the communicator are connected.

        Raises:
            WavebusError: an end is missing, or the sender was closed meanwhile.
        """

    def on_opened(self) -> None:  # noqa: B027 - as above
        """Is called when every engine has opened its end."""

    @abstractmethod
    def put(self, seq: int, tensors: Sequence[torch.Tensor]) -> bytes:
        """Makes one chunk ready for the engines, and returns the handle that announces it.

        Args:
            seq: number of the chunk in its update, from 0.
            tensors: the chunk's tensors, of any shape, dtype, strides and device.

        Returns:
            The handle for the chunk's WEIGHT_CHUNK_META.

        Raises:
            UsageError: a tensor is where this backend can't send it from.
            WavebusError: the chunk can't be offered.
        """

    def queue(self, seq: int) -> None:  # noqa: B027 - as above
        """Queues the chunk to be sent after those before it, without waiting for those.

        Args:
            seq: number of a chunk that was put.

        Raises:
            WavebusError: the transport failed or was closed.
        """

    def transfer(self, seq: int) -> None:  # noqa: B027 - as above
        """Returns when the chunk is sent; sends the chunk first if it was not queued.

        Engines receive the chunk meanwhile.

        Args:
            seq: number of a chunk that was put.

        Raises:
            WavebusError: the transport failed or was closed.
        """

    def on_taken(self, seq: int) -> None:  # noqa: B027 - as above
        """Is called when every engine has applied the chunk; its memory is free again.

        Args:
            seq: number of the chunk.
        """

    def packed_bytes(self, sizes_bytes: Sequence[int]) -> int:
        """Returns how many bytes of a buffer the tensors of one chunk take.

        Args:
            sizes_bytes: size of each tensor in bytes.

        Returns:
            The bytes. Unpacked tensors take none; 1 is returned, so that the transport is opened.
        """
        return sum(map(aligned, sizes_bytes)) if self.packed else 1

    @abstractmethod
    def close(self) -> None:
        """Frees everything. Ends a :meth:`meet` that waits in another thread."""


class Receiver(ABC):
    """The engine's end of a backend. A second :meth:`open` replaces the transport.

    A wait for the other end must end by itself if that end is gone or silent.

    Attributes:
        room_bytes: size limit of a packed chunk in bytes; None: no limit. May change with
            :meth:`open`.
        device: where the engine has its weights. Set before :meth:`open`. Most receivers return
            tensors in CPU memory, whatever the device is.
        is_owned: whether received tensors belong to the caller and stay valid after
            :meth:`release`. May change with :meth:`open`.
        is_lasting: whether received tensors stay valid until :meth:`release` even if the other end
            is gone. Otherwise the caller copies them at once.
        is_blocking: whether :meth:`receive` waits for the other end, or copies the chunk.
        is_collective: whether :meth:`receive` waits for all ends of a communicator. Another thread
            may then call :meth:`close` meanwhile, and open the transport again.
        can_launch: whether :meth:`launch` returns before the chunk is there.
        prefetch_depth: how many chunks may be received before the first is released. If it is more
            than 1, or the receiver :attr:`is_collective`, :meth:`receive` runs in a thread of its
            own. May change with :meth:`open`.
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
        """Connects to the sender.

        Args:
            params: what :meth:`Sender.open` returned.
            place: this end's rank, for backends with collectives.

        Raises:
            EngineError: code ``transfer_failed``.
        """

    def launch(
        self,
        tensors: tuple[TensorMeta, ...],
        handle: bytes,
        into: ReceivedChunk | None = None,  # noqa: ARG002 - for receivers that can
    ) -> Callable[[], Tensors]:
        """Begins to fetch one chunk without waiting for the sender.

        So the next chunk can be launched before this one is there. On a GPU, :attr:`device` is the
        current one.

        Args:
            tensors: names, dtypes and shapes of the chunk's tensors, in order.
            handle: what :meth:`Sender.put` returned.
            into: tensors of these shapes on the weights' device, laid out as in a packed chunk. A
                receiver that can receive there without a copy does so; the result is ``into``.

        Returns:
            A function that waits for the chunk and returns its tensors. It is called once, in any
            thread.

        Raises:
            EngineError: code ``transfer_failed``. No memory is held then.
        """
        return lambda: self.receive(tensors, handle)

    @abstractmethod
    def receive(self, tensors: tuple[TensorMeta, ...], handle: bytes) -> Tensors:
        """Fetches one chunk.

        Args:
            tensors: names, dtypes and shapes of the chunk's tensors, in order.
            handle: what :meth:`Sender.put` returned.

        Returns:
            ``(name, tensor)`` pairs, in order. The tensors are valid until :meth:`release`, or for
            good if they are :attr:`is_owned`.

        Raises:
            EngineError: code ``transfer_failed``. No memory is held then.
        """

    def receive_into(
        self,
        tensors: tuple[TensorMeta, ...],  # noqa: ARG002 - for receivers that can
        handle: bytes,  # noqa: ARG002
        into: ReceivedChunk,  # noqa: ARG002
    ) -> bool:
        """Fetches one chunk into given tensors with a single copy, if this receiver can.

        Args:
            tensors: names, dtypes and shapes of the chunk's tensors, in order.
            handle: what :meth:`Sender.put` returned.
            into: tensors of these shapes on the weights' device. They are complete on return.

        Returns:
            Whether the chunk was received. If not, nothing has happened: call :meth:`receive`.

        Raises:
            EngineError: code ``transfer_failed``. No memory is held then.
        """
        return False

    def release(self) -> None:  # noqa: B027 - most have nothing to do
        """Frees the memory of the oldest received chunk, whose tensors are not used again."""

    @abstractmethod
    def close(self) -> None:
        """Closes the transport."""
