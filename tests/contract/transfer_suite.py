"""What the two ends of a transfer backend must do, whoever wrote them.

A subclass names its backend, which must be registered on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.transfer import available_backends as receivers
from sidecar.transfer import check_delivered, make_receiver
from trainer_agent.sources import meta_of
from trainer_agent.transfer import available_backends as senders
from trainer_agent.transfer import make_sender

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.manifest import TensorMeta
    from sidecar.transfer import Receiver
    from trainer_agent.transfer import Sender

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


class TransferContract:
    """The suite."""

    backend: str

    @pytest.fixture
    def sender(self) -> Iterator[Sender]:
        made = make_sender(self.backend)
        yield made
        made.close()

    @pytest.fixture
    def receiver(self) -> Iterator[Receiver]:
        made = make_receiver(self.backend)
        yield made
        made.close()

    def room(self, sender: Sender) -> int:
        return sender.packed_bytes([meta.size_bytes for meta in METAS])

    def test_both_sides_have_it(self) -> None:
        """What a trainer can send by, an engine can receive by."""
        assert self.backend in senders()
        assert self.backend in receivers()

    def test_tensors_of_every_kind_arrive(self, sender: Sender, receiver: Receiver) -> None:
        """Mixed dtypes, an empty tensor, a scalar and one that is not contiguous, bit for bit;
        in more chunks than the sender has room for at once."""
        receiver.open(sender.open(self.room(sender)))
        sender.opened()
        for seq in range(2 * sender.depth + 1):
            handle = sender.put(seq, list(TENSORS.values()))
            received = receiver.receive(METAS, handle)
            check_delivered(self.backend, METAS, received)
            for (_, got), tensor in zip(received, TENSORS.values(), strict=True):
                assert torch.equal(raw(got), raw(tensor))
            receiver.release()
            sender.taken(seq)

    def test_as_many_chunks_as_it_says_are_under_way(
        self, sender: Sender, receiver: Receiver
    ) -> None:
        """The later ones don't overwrite the first."""
        receiver.open(sender.open(64))
        sender.opened()
        chunks = [torch.full((4,), float(seq)) for seq in range(sender.depth)]
        handles = [sender.put(seq, [chunk]) for seq, chunk in enumerate(chunks)]
        for seq, (chunk, handle) in enumerate(zip(chunks, handles, strict=True)):
            [(_, got)] = receiver.receive((meta_of("w", chunk),), handle)
            assert torch.equal(got, chunk)
            receiver.release()
            sender.taken(seq)

    def test_an_engine_that_comes_late_opens_anew(self, sender: Sender, receiver: Receiver) -> None:
        """Whatever the transport was before."""
        sender.open(64)
        sender.opened()
        receiver.open(sender.open(self.room(sender)))
        receiver.open(sender.open(self.room(sender)))
        sender.opened()
        [(_, got)] = receiver.receive((METAS[0],), sender.put(0, [TENSORS["float32"]]))
        assert torch.equal(got, TENSORS["float32"])

    def test_a_transport_that_is_not_there_is_refused(
        self, sender: Sender, receiver: Receiver
    ) -> None:
        params = sender.open(64)
        sender.close()
        with pytest.raises(EngineError) as refused:
            receiver.open(params)
        assert refused.value.code is NackCode.TRANSFER_FAILED
