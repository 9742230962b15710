"""What nccl and ipc do without a GPU: say so, and read what the other end says strictly.

What they do with one is in ``tests/gpu``.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch

from bus._weight_transfer import cuda, formats
from bus._weight_transfer.allocation import NO_RANK, RankAssignment
from bus._weight_transfer.cuda import current_gpu, resolve_gpu
from bus._weight_transfer.formats import (
    BroadcastChunk,
    IpcInit,
    IpcMemory,
    LentTensors,
    NcclInit,
    PackedChunk,
    aligned,
    decode,
    encode,
)
from bus._weight_transfer.ipc import IpcReceiver, IpcSender, _Mapped
from bus._weight_transfer.nccl import NcclReceiver, NcclSender, _as_contiguous_bytes
from bus._weight_transfer.packing import ViewCache, check_lent, pack, packed_offsets
from bus._weight_transfer.registry import make_receiver, make_sender
from bus._weight_transfer.registry import receiver_backends as receivers
from bus._weight_transfer.registry import sender_backends as senders
from bus.errors import EngineError, UsageError
from bus.messages import NackCode
from tests.contract.transfer_suite import METAS, TENSORS, raw
from trainer_agent import SyncTrainerAgent, TrainerAgent
from trainer_agent._weights.source import meta_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus._weight_transfer.base import Receiver
    from bus._weight_transfer.packing import ReceivedChunk

HANDLE = bytes(range(64))
MEMORY = IpcMemory(HANDLE, 4096)
NCCL = {
    "host": "h",
    "port": 1,
    "barrier_port": 2,
    "token": bytes(16),
    "chunk_bytes": 64,
    "buffers": 2,
    "timeout_ms": 1000,
    "version": "2.29.7",
}
IPC = {
    "gpu": "0a1b2c3d-0000-1111-2222-333344445555",
    "buffers": [{"handle": HANDLE, "size_bytes": 4096}],
    "buffer_bytes": 4096,
}
no_cuda = pytest.mark.skipif(not cuda.unavailable_reason(), reason="there is CUDA on this machine")


@no_cuda
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_a_machine_without_cuda_neither_lists_nor_makes_them(backend: str) -> None:
    """At once, and with the reason."""
    assert backend not in senders()
    assert backend not in receivers()
    with pytest.raises(UsageError, match=f"backend='{backend}': it needs CUDA"):
        make_sender(backend)
    with pytest.raises(EngineError, match="it needs CUDA") as refused:
        make_receiver(backend)
    assert refused.value.code is NackCode.BACKEND_MISSING
    with pytest.raises(UsageError, match="it needs CUDA"):
        TrainerAgent(backend=backend)


@no_cuda
def test_why_it_is_missing_names_this_torch() -> None:
    assert torch.__version__ in cuda.unavailable_reason()
    assert "CUDA" in cuda.nccl_unavailable_reason()


def test_who_always_packs_says_so() -> None:
    with pytest.raises(UsageError, match="packed=False: gloo always packs"):
        make_sender("gloo", packed=False)


def test_a_sender_is_told_what_it_needs_before_it_opens() -> None:
    sender = make_sender("shm", buffers=3, device="cuda:1")
    assert (sender.prefetch_depth, sender.packed, sender.device) == (3, True, "cuda:1")


def test_a_receiver_knows_where_its_engine_has_its_weights() -> None:
    assert make_receiver("shm").device == torch.device("cpu")
    assert make_receiver("shm", torch.device("meta")).device == torch.device("meta")
    assert not make_receiver("gloo").is_owned


def test_a_device_that_is_no_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="name a GPU"):
        resolve_gpu("cpu")
    assert resolve_gpu("cuda:3") == torch.device("cuda", 3)


@no_cuda
def test_a_trainer_that_uses_no_gpu_has_no_current_one() -> None:
    assert not current_gpu()
    assert SyncTrainerAgent()._kwargs == {"device": ""}


@pytest.mark.parametrize("sender", [NcclSender(), IpcSender()])
def test_unpacked_chunks_take_no_room_but_open_the_transport(
    sender: NcclSender | IpcSender,
) -> None:
    assert sender.packed_bytes([65, 0, 1]) == 192
    sender.packed = False
    assert sender.packed_bytes([65, 0, 1]) == 1


@pytest.mark.parametrize("receiver", [NcclReceiver(), IpcReceiver()])
def test_an_engine_whose_weights_are_on_the_cpu_is_refused(receiver: Receiver) -> None:
    """Before it could leave anybody waiting."""
    params = encode(NCCL if isinstance(receiver, NcclReceiver) else IPC)
    with pytest.raises(EngineError, match="weights are on cpu: use shm or gloo") as refused:
        receiver.open(params, RankAssignment(1, 2, 1))
    assert refused.value.code is NackCode.TRANSFER_FAILED
    receiver.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"port": 0}, "port"),
        ({"host": ""}, "host"),
        ({"chunk_bytes": -1}, "chunk_bytes"),
        ({"buffers": 0}, "buffers"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"version": "2" * 33}, "version"),
        ({"version": 2}, "version"),
    ],
)
def test_nccls_params_out_of_bounds_are_refused_by_field(
    change: dict[str, object], told: str
) -> None:
    with pytest.raises(EngineError, match=told):
        NcclReceiver().open(encode({**NCCL, **change}), RankAssignment(1, 2, 1))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gpu": ""}, "gpu"),
        ({"gpu": "../x"}, "gpu"),
        ({"buffer_bytes": -1}, "buffer_bytes"),
        ({"buffers": [{"handle": b"x" * 63, "size_bytes": 1}]}, "handle"),
        ({"buffers": [{"handle": b"x" * 65, "size_bytes": 1}]}, "handle"),
        ({"buffers": [{"handle": HANDLE, "size_bytes": 0}]}, "size_bytes"),
        ({"buffers": IPC["buffers"] * 17}, "buffers"),  # type: ignore[operator]
    ],
)
def test_ipcs_params_out_of_bounds_are_refused_by_field(
    change: dict[str, object], told: str
) -> None:
    with pytest.raises(EngineError, match=told):
        IpcReceiver().open(encode({**IPC, **change}), NO_RANK)


@pytest.mark.parametrize("receiver", [NcclReceiver(), IpcReceiver()])
def test_nothing_is_received_before_it_is_open(receiver: Receiver) -> None:
    handle = encode(BroadcastChunk(0) if isinstance(receiver, NcclReceiver) else PackedChunk(0, ()))
    with pytest.raises(EngineError, match="open") as refused:
        receiver.receive((), handle)
    assert refused.value.code is NackCode.TRANSFER_FAILED


@pytest.mark.parametrize(
    "said",
    [
        NcclInit("h", 1, 2, b"t" * 16, 0, 2, 1000, "2.29.7"),
        BroadcastChunk(7),
        IpcInit("gpu-1", (MEMORY, MEMORY), 4096),
        PackedChunk(1, (0, 64)),
        LentTensors((MEMORY,), (0, 0), (0, 64)),
    ],
)
def test_what_is_said_arrives(said: object) -> None:
    kind = LentTensors[IpcMemory] if isinstance(said, LentTensors) else type(said)
    assert decode(encode(said), kind) == said


def test_handles_of_lent_tensors_are_checked_before_anything_is_mapped() -> None:
    """Every tensor that has bytes lies wholly in an allocation that was named."""
    full = meta_of("w", torch.zeros(4))
    empty = meta_of("none", torch.zeros(0, 3))
    check_lent(LentTensors((MEMORY,), (0, 0), (4080, 0)), (full, full))
    check_lent(LentTensors((), (9,), (1 << 40,)), (empty,))
    for lent, word in (
        (LentTensors((MEMORY,), (0,), (4081,)), "ends at byte 4097 of 4096"),
        (LentTensors((MEMORY,), (1,), (0,)), "memory 1 of 1"),
        (LentTensors((MEMORY,), (), (0,)), "0 memories"),
        (LentTensors((MEMORY,), (0, 0), (0, 0)), "for 1 tensors"),
    ):
        with pytest.raises(EngineError, match=word) as refused:
            check_lent(lent, (full,))
        assert refused.value.code is NackCode.TRANSFER_FAILED


def test_a_handle_fits_a_chunk_of_many_small_tensors() -> None:
    """A chunk of 100,000 tensors in one allocation: under the bound of the bus's blobs."""
    many = 100_000
    offsets = tuple(range(0, many * 512, 512))
    assert len(encode(LentTensors((MEMORY,), (0,) * many, offsets))) < 1 << 20


def test_cudas_handle_is_as_long_as_the_driver_says() -> None:
    assert ctypes.sizeof(cuda._Handle) == formats.HANDLE_BYTES == 64


def test_a_driver_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_LIBRARY", "libnocuda.so.1")
    with pytest.raises(cuda.CudaError, match=r"can't load libnocuda\.so\.1"):
        cuda.driver.__wrapped__()


def test_the_suites_tensors_would_come_in_one_piece_each() -> None:
    """Bytes of every dtype, shape and stride, without a copy where they lie in order."""

    for meta, tensor in zip(METAS, TENSORS.values(), strict=True):
        piece = _as_contiguous_bytes(tensor, tensor.device)
        assert piece.dtype == torch.uint8
        assert piece.shape == (meta.size_bytes,)
        assert torch.equal(piece, raw(tensor))
        if tensor.is_contiguous() and tensor.numel():
            assert piece.data_ptr() == tensor.data_ptr()


class Opened(IpcReceiver):
    """With ordinary memory in place of the trainer's GPU's, which is known by its handle."""

    def __init__(self, memories: dict[bytes, torch.Tensor], *, packed: bool) -> None:
        super().__init__()
        self._memories = memories
        self._open, self._packed = True, packed
        lent = [IpcMemory(handle, memory.numel()) for handle, memory in memories.items()]
        self._buffers = self._map(lent) if packed else []
        self.unmapped = 0

    def _map(self, memories: Sequence[IpcMemory]) -> list[_Mapped]:
        return [_Mapped(0, self._memories[memory.handle]) for memory in memories]

    def _unmap(self, mapped: Sequence[_Mapped]) -> list[_Mapped]:
        self.unmapped += len(mapped)
        return []


def a_place() -> ReceivedChunk:
    """Where the suite's tensors are to lie, packed; with nothing there yet."""
    *offsets, end = packed_offsets(METAS)
    return ViewCache().get(torch.zeros(end, dtype=torch.uint8), tuple(offsets), METAS)


def holds_all(place: ReceivedChunk) -> bool:
    return all(torch.equal(raw(tensor), raw(TENSORS[name])) for name, tensor in place)


def test_a_packed_chunk_of_ipc_is_copied_in_one_piece_to_where_it_is_to_lie() -> None:
    """If it is packed alike, as it is by a trainer of this version; else it comes as ever."""
    place, buffer = a_place(), torch.zeros(4096, dtype=torch.uint8)
    *offsets, _ = pack(buffer, [TENSORS[meta.name] for meta in METAS])
    receiver = Opened({HANDLE: buffer}, packed=True)
    chunk = encode(PackedChunk(0, tuple(offsets)))
    assert receiver.receive_into(METAS, chunk, place)
    receiver.release()
    assert holds_all(place)
    moved = PackedChunk(0, (*offsets[:-1], offsets[-1] + 64))
    assert not receiver.receive_into(METAS, encode(moved), place)
    short = Opened({HANDLE: buffer[: place.memory.numel() - 1]}, packed=True)
    assert not short.receive_into(METAS, chunk, place)
    with pytest.raises(EngineError, match="buffer 1 of 1"):
        receiver.receive_into(METAS, encode(PackedChunk(1, tuple(offsets))), place)


def test_a_lent_chunk_of_ipc_is_copied_to_where_it_is_to_lie_and_unmapped() -> None:
    """Tensor by tensor, from memories of the trainer's own."""
    place, other = a_place(), bytes(64)
    memories = {HANDLE: torch.zeros(512, dtype=torch.uint8), other: torch.zeros(512).byte()}
    memory_of, offsets, end = [], [], 0
    for index, meta in enumerate(METAS):
        memory_of.append(index % 2)
        offsets.append(end)
        tensor = raw(TENSORS[meta.name])
        list(memories.values())[index % 2][end : end + tensor.numel()] = tensor
        end += aligned(tensor.numel())
    lent = tuple(IpcMemory(handle, memory.numel()) for handle, memory in memories.items())
    receiver = Opened(memories, packed=False)
    chunk = encode(LentTensors(lent, tuple(memory_of), tuple(offsets)))
    assert receiver.receive_into(METAS, chunk, place)
    assert not receiver.unmapped
    receiver.release()
    assert receiver.unmapped == 2
    assert holds_all(place)
    with pytest.raises(EngineError, match="tensors"):
        receiver.receive_into(METAS[1:], chunk, place)


def test_ipc_has_nothing_anywhere_before_it_is_opened() -> None:
    with pytest.raises(EngineError, match="open it first"):
        IpcReceiver().receive_into(METAS, b"", a_place())
