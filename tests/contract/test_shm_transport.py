"""The two ends of the shared memory transport."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bus._locked_paths import SHM_PREFIX
from bus._weight_transfer.allocation import ALONE, NO_RANK
from bus._weight_transfer.formats import (
    SHM_FOLDER,
    LentTensors,
    PackedChunk,
    ShmInit,
    ShmMemory,
    decode,
    encode,
)
from bus._weight_transfer.registry import make_receiver, make_sender
from bus._weight_transfer.shm import ShmSender, allocate, sweep
from bus.errors import EngineError
from bus.messages import NackCode
from tests.contract.transfer_suite import METAS, TENSORS, Ends, TransferContract
from tests.support.users import as_nobody
from trainer_agent._weights.source import meta_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def room() -> int:
    return ShmSender().packed_bytes([meta.size_bytes for meta in METAS])


@pytest.fixture
def sender() -> Iterator[ShmSender]:
    made = ShmSender()
    yield made
    made.close()


def segments() -> list[str]:
    return [p.name for p in Path(SHM_FOLDER).glob(f"{SHM_PREFIX}{os.getpid()}-*")]


class TestContract(TransferContract):
    """What every backend keeps."""

    backend = "shm"


class TestUnpackedContract(TransferContract):
    """The same where nothing is packed."""

    backend = "shm"

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        made = Ends(self.backend)
        made.sender = make_sender(self.backend, packed=False)
        yield made
        made.close()

    def test_a_transport_that_is_not_there_is_refused(self, ends: Ends) -> None:
        """There is none to be opened; memory that is gone is refused when it is needed."""
        ends.open(1)
        handle = ends.sender.put(0, [TENSORS["float32"]])
        ends.sender.on_taken(0)
        with pytest.raises(EngineError, match="can't open") as refused:
            ends.receiver.receive((METAS[0],), handle)
        assert refused.value.code is NackCode.TRANSFER_FAILED


def test_names_are_gone_as_soon_as_everybody_has_them(sender: ShmSender) -> None:
    """So nothing is left behind, whoever is killed; the memory serves on."""
    receiver = make_receiver("shm")
    params = sender.open(room(), ALONE)
    assert len(segments()) == 2
    receiver.open(params, NO_RANK)
    sender.on_opened()
    assert segments() == []
    handle = sender.put(0, list(TENSORS.values()))
    assert torch.equal(receiver.receive(METAS, handle)[0][1], TENSORS["float32"])


def test_opening_again_replaces_the_ring(sender: ShmSender) -> None:
    """An engine that joined late gets a ring that it can still open."""
    sender.open(64, ALONE)
    sender.on_opened()
    receiver = make_receiver("shm")
    receiver.open(sender.open(room(), ALONE), NO_RANK)
    handle = sender.put(0, list(TENSORS.values()))
    assert torch.equal(receiver.receive(METAS, handle)[0][1], TENSORS["float32"])
    sender.close()
    assert segments() == []


def _leave_one_behind(queue: multiprocessing.Queue[Sequence[str]]) -> None:
    sender = ShmSender()
    sender.open(64, ALONE)
    queue.put(segments())
    queue.close()
    queue.join_thread()
    os.kill(os.getpid(), 9)


@pytest.mark.ci
def test_segments_of_a_killed_trainer_are_swept(sender: ShmSender) -> None:
    """Those whose owner is gone are removed by the next trainer; a living one's are not."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[Sequence[str]] = context.Queue()
    process = context.Process(target=_leave_one_behind, args=(queue,))
    process.start()
    left = queue.get(timeout=60)
    process.join()
    sender.open(64, ALONE)
    own = segments()
    assert not any((Path(SHM_FOLDER) / name).exists() for name in left)
    assert sweep() == []
    assert sorted(segments()) == sorted(own)


@pytest.mark.ci
def test_a_file_of_another_user_stops_no_update(sender: ShmSender) -> None:
    """Anybody can make one with such a name in the shared folder, and only its owner remove it."""
    stranger = Path(SHM_FOLDER) / f"{SHM_PREFIX}x-{os.getpid()}"
    stranger.touch(0o644)
    try:
        with as_nobody():
            receiver = make_receiver("shm")
            receiver.open(sender.open(room(), ALONE), NO_RANK)
            sender.on_opened()
            handle = sender.put(0, list(TENSORS.values()))
            assert torch.equal(receiver.receive(METAS, handle)[0][1], TENSORS["float32"])
        assert stranger.exists() is (os.geteuid() == 0)  # one's own is swept
    finally:
        stranger.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (b"", "ShmInit"),
        (b"\xc1", "ShmInit"),
        (encode(ShmInit(("wavebus-not-there",), 64)), "one host"),
        (encode({"segments": ["../etc/passwd"], "segment_bytes": 64}), "segments"),
        (encode({"segments": ["wavebus-../x"], "segment_bytes": 64}), "segments"),
        (encode({"segments": [], "segment_bytes": 64}), "segment_bytes: 64 of 0 segments"),
        (encode({"segments": ["wavebus-x"], "segment_bytes": 0}), "segment_bytes"),
    ],
)
def test_bad_params_are_refused(params: bytes, word: str) -> None:
    """The blob is typed and bounded, and a name can't leave the folder."""
    with pytest.raises(EngineError, match=word) as refused:
        make_receiver("shm").open(params, NO_RANK)
    assert refused.value.code is NackCode.TRANSFER_FAILED


def test_bad_handles_are_refused(sender: ShmSender) -> None:
    """A handle that points outside the ring or a segment names what is wrong."""
    receiver = make_receiver("shm")
    receiver.open(sender.open(room(), ALONE), NO_RANK)
    meta = meta_of("w", torch.zeros(4))
    for handle, word in (
        (PackedChunk(2, (0,)), "segment 2"),
        (PackedChunk(0, ()), "0 offsets"),
        (PackedChunk(0, (1 << 40,)), "ends at byte"),
    ):
        with pytest.raises(EngineError, match=word):
            receiver.receive((meta,), encode(handle))
    with pytest.raises(EngineError, match="PackedChunk"):
        receiver.receive((meta,), b"\x90")


# Memory that is lent


def in_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of it there, behind some bytes that are none of it."""
    memory = allocate(64 + tensor.nbytes)
    copy = memory[64:].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def mappings() -> int:
    """How many mappings of lent memory this process has: the trainer's and the engines'."""
    with Path("/proc/self/maps").open(encoding="utf-8") as lines:
        return sum("/memfd:wavebus" in line for line in lines)


@pytest.fixture
def lending() -> Iterator[Ends]:
    made = Ends("shm")
    made.sender = make_sender("shm", packed=False)
    made.open(1)
    yield made
    made.close()


def test_what_lies_in_shared_memory_is_not_copied(lending: Ends) -> None:
    """Engines see what the trainer writes there, and none of what they write reaches it."""
    tensor = in_shared_memory(torch.arange(12.0).reshape(3, 4))
    meta = meta_of("w", tensor)
    [(_, got)] = lending.send(0, (meta,), lending.sender.put(0, [tensor]))
    assert torch.equal(got, tensor)
    tensor[1, 1] = 77.0
    assert got[1, 1] == 77.0
    got[2, 2] = 99.0
    assert tensor[2, 2] == 10.0


def test_a_part_of_what_lies_there_is_not_copied_unless_it_has_gaps(lending: Ends) -> None:
    whole = in_shared_memory(torch.arange(12.0).reshape(3, 4))
    parts = [whole[1:], whole[:, 1]]
    metas = tuple(meta_of(str(place), part) for place, part in enumerate(parts))
    received = lending.send(0, metas, lending.sender.put(0, parts))
    whole.zero_()
    assert [got.tolist() for _, got in received] == [[[0.0] * 4] * 2, [1.0, 5.0, 9.0]]


def test_memory_is_mapped_once_and_only_as_long_as_chunks_lie_there(lending: Ends) -> None:
    """Or the engines would keep the memory of models that are gone."""
    first, second = in_shared_memory(torch.ones(5)), in_shared_memory(torch.zeros(5))
    meta = meta_of("w", first)
    places = set()
    before = mappings()
    for seq in range(3):
        [(_, got)] = lending.send(seq, (meta,), lending.sender.put(seq, [first]))
        places.add(got.data_ptr())
        lending.taken(seq)
    assert len(places) == 1
    assert mappings() == before + 1
    del got
    [(_, got)] = lending.send(3, (meta,), lending.sender.put(3, [second]))
    assert torch.equal(got, second)
    assert mappings() == before + 1
    del got
    lending.receiver.close()
    assert mappings() == before


def test_memory_goes_with_its_last_tensor() -> None:
    before, files = mappings(), len(list(Path("/proc/self/fd").iterdir()))
    part = in_shared_memory(torch.ones(1000))[10:20]
    assert mappings() == before + 1
    assert torch.equal(part, torch.ones(10))
    del part
    assert (mappings(), len(list(Path("/proc/self/fd").iterdir()))) == (before, files)


def _lend_and_wait(handles: multiprocessing.Queue[tuple[bytes, bytes]]) -> None:
    sender = make_sender("shm", packed=False)
    params = sender.open(1, ALONE)
    tensor = in_shared_memory(TENSORS["float32"])
    handles.put((params, sender.put(0, [tensor])))
    signal.pause()


def test_a_killed_trainer_leaves_nothing_but_what_engines_have_mapped() -> None:
    """Who has mapped its memory, reads on; who has not, is told by name that it can't."""
    context = multiprocessing.get_context("spawn")
    handles: multiprocessing.Queue[tuple[bytes, bytes]] = context.Queue()
    process = context.Process(target=_lend_and_wait, args=(handles,))
    process.start()
    params, handle = handles.get(timeout=60)
    before = mappings()
    receiver, late = make_receiver("shm"), make_receiver("shm")
    for each in (receiver, late):
        each.open(params, NO_RANK)
    [(_, got)] = receiver.receive((METAS[0],), handle)
    assert torch.equal(got, TENSORS["float32"])
    process.kill()
    process.join()
    assert torch.equal(got, TENSORS["float32"])
    with pytest.raises(EngineError, match="can't open") as refused:
        late.receive((METAS[0],), handle)
    assert refused.value.code is NackCode.TRANSFER_FAILED
    assert not list(Path(SHM_FOLDER).glob(f"{SHM_PREFIX}{process.pid}-*"))
    del got
    receiver.close()
    assert mappings() == before


def test_other_memory_than_the_trainers_is_not_read(lending: Ends) -> None:
    """Where engines don't see the trainer's processes, its numbers are another's."""
    tensor = in_shared_memory(torch.ones(5))
    other = in_shared_memory(torch.zeros(5))
    meta = meta_of("w", tensor)
    [memory] = decode(lending.sender.put(0, [tensor]), LentTensors[ShmMemory]).memories
    [others] = decode(lending.sender.put(1, [other]), LentTensors[ShmMemory]).memories
    for wrong in (
        replace(memory, descriptor=others.descriptor),
        replace(memory, inode=others.inode),
        replace(memory, device=memory.device + 1),
        replace(memory, size_bytes=memory.size_bytes + 1),
    ):
        with pytest.raises(EngineError, match="is not the memory that the trainer lends"):
            lending.receiver.receive((meta,), encode(LentTensors((wrong,), (0,), (64,))))


def test_bad_handles_of_lent_memory_are_refused(lending: Ends) -> None:
    """Nothing of it is mapped then."""
    tensor = in_shared_memory(torch.ones(5))
    meta = meta_of("w", tensor)
    handle = decode(lending.sender.put(0, [tensor]), LentTensors[ShmMemory])
    before = mappings()
    for wrong, word in (
        (replace(handle, memory_of=(1,)), "memory 1 of 1"),
        (replace(handle, offsets_bytes=(65,)), "ends at byte 85 of 84"),
        (replace(handle, offsets_bytes=()), "0 offsets"),
        (LentTensors((ShmMemory(0, 0, 0, 0, 1),), (0,), (0,)), "pid"),
        (PackedChunk(0, (0,)), "LentTensors"),
    ):
        with pytest.raises(EngineError, match=word) as refused:
            lending.receiver.receive((meta,), encode(wrong))
        assert refused.value.code is NackCode.TRANSFER_FAILED
    assert mappings() == before
