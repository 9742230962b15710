"""What the two ends of a transfer backend must do, whoever wrote them.

A subclass names its backend, which must be registered on both sides.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch

from bus._weight_transfer.allocation import ALONE, NO_RANK, RankAssignment, World
from bus._weight_transfer.checksum import checksums
from bus._weight_transfer.registry import make_receiver, make_sender
from bus._weight_transfer.registry import receiver_backends as receivers
from bus._weight_transfer.registry import sender_backends as senders
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._transfer.verification import check_delivered, check_sums
from trainer_agent._weights.source import meta_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bus._manifest import TensorMeta

T = TypeVar("T")

TENSORS: dict[str, torch.Tensor] = {
    "float32": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "bfloat16": torch.arange(7, dtype=torch.bfloat16),
    "not contiguous": torch.arange(20, dtype=torch.float64).reshape(4, 5).T,
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "bool": torch.tensor([True, False, True]),
    "float8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
}
METAS: tuple[TensorMeta, ...] = tuple(meta_of(name, tensor) for name, tensor in TENSORS.items())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    return tensor.contiguous().flatten().view(torch.uint8)


class Ends:
    """Both ends of one backend in one process, in threads where they wait for each other."""

    def __init__(self, backend: str) -> None:
        self.sender = make_sender(backend)
        self.receiver = make_receiver(backend)
        self._threads = ThreadPoolExecutor(2)

    def room(self) -> int:
        return self.sender.packed_bytes([meta.size_bytes for meta in METAS])

    def open(self, room_bytes: int, *, number: int = 1) -> None:
        world, place = ALONE, NO_RANK
        if self.sender.is_collective:
            world, place = World(number, 2, "127.0.0.1"), RankAssignment(number, 2, 1)
        params = self.sender.open(room_bytes, world)
        self._both(lambda: self.receiver.open(params, place), self.sender.meet)
        self.sender.on_opened()

    def send(
        self, seq: int, metas: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        """What is received of a chunk that was put."""
        return self._both(
            lambda: self.receiver.receive(metas, handle), lambda: self.sender.transfer(seq)
        )

    def taken(self, seq: int) -> None:
        self.receiver.release()
        self.sender.on_taken(seq)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self._threads.shutdown()

    def _both(self, theirs: Callable[[], T], ours: Callable[[], None]) -> T:
        receiving, sending = self._threads.submit(theirs), self._threads.submit(ours)
        sending.result()
        return receiving.result()


class TransferContract:
    """The suite."""

    backend: str

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        made = Ends(self.backend)
        yield made
        made.close()

    def test_both_sides_have_it(self) -> None:
        """What a trainer can send by, an engine can receive by."""
        assert self.backend in senders()
        assert self.backend in receivers()

    def test_tensors_of_every_kind_arrive(self, ends: Ends) -> None:
        """Mixed dtypes, an empty tensor, a scalar and one that is not contiguous, bit for bit;
        in more chunks than the sender has room for at once."""
        ends.open(ends.room())
        tensors = list(TENSORS.values())
        for seq in range(2 * ends.sender.prefetch_depth + 1):
            received = ends.send(seq, METAS, ends.sender.put(seq, tensors))
            check_delivered(self.backend, METAS, received)
            for (_, got), tensor in zip(received, tensors, strict=True):
                assert torch.equal(raw(got), raw(tensor))
            if ends.sender.is_bit_exact:
                check_sums(seq, received, "full", checksums(tensors, "full"))
            ends.taken(seq)

    def test_a_tensor_larger_than_any_chunk_gets_one_of_its_own(self, ends: Ends) -> None:
        """Rooms are made for the largest chunk, and smaller ones fit as well."""
        large, small = torch.arange(100_000, dtype=torch.int64), torch.ones(3)
        ends.open(ends.sender.packed_bytes([large.numel() * large.element_size()]))
        for seq, tensor in enumerate((large, small, large)):
            handle = ends.sender.put(seq, [tensor])
            [(_, got)] = ends.send(seq, (meta_of("w", tensor),), handle)
            assert torch.equal(got, tensor)
            ends.taken(seq)

    def test_a_chunk_of_nothing_but_empty_tensors(self, ends: Ends) -> None:
        empty = torch.empty(0, 7)
        ends.open(64)
        received = ends.send(0, (meta_of("w", empty),), ends.sender.put(0, [empty]))
        assert [(name, tuple(got.shape)) for name, got in received] == [("w", (0, 7))]

    def test_as_many_chunks_as_it_says_are_under_way(self, ends: Ends) -> None:
        """The later ones don't overwrite the first."""
        ends.open(64)
        chunks = [torch.full((4,), float(seq)) for seq in range(ends.sender.prefetch_depth)]
        handles = [ends.sender.put(seq, [chunk]) for seq, chunk in enumerate(chunks)]
        for seq, (chunk, handle) in enumerate(zip(chunks, handles, strict=True)):
            [(_, got)] = ends.send(seq, (meta_of("w", chunk),), handle)
            assert torch.equal(got, chunk)
            ends.taken(seq)

    def test_an_engine_that_comes_late_opens_anew(self, ends: Ends) -> None:
        """Whatever the transport was before."""
        for number in (1, 2):
            ends.open(ends.room(), number=number)
        tensor = TENSORS["float32"]
        [(_, got)] = ends.send(0, (METAS[0],), ends.sender.put(0, [tensor]))
        assert torch.equal(got, tensor)

    def test_a_transport_that_is_not_there_is_refused(self, ends: Ends) -> None:
        world = World(1, 2, "127.0.0.1")
        params = ends.sender.open(64, world)
        ends.sender.close()
        with pytest.raises(EngineError) as refused:
            ends.receiver.open(params, RankAssignment(1, 2, 1))
        assert refused.value.code is NackCode.TRANSFER_FAILED
