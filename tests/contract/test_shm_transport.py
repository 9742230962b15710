"""The two ends of the shared memory transport."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import EngineError
from bus.messages import NackCode
from bus.transfer import ALONE, NO_PLACE, SHM_FOLDER, SHM_PREFIX, ShmChunk, ShmInit, encode
from sidecar.transfer import make_receiver
from tests.contract.transfer_suite import METAS, TENSORS, TransferContract
from trainer_agent.sources import meta_of
from trainer_agent.transfer.shm import ShmSender, sweep

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


def test_names_are_gone_as_soon_as_everybody_has_them(sender: ShmSender) -> None:
    """So nothing is left behind, whoever is killed; the memory serves on."""
    receiver = make_receiver("shm")
    params = sender.open(room(), ALONE)
    assert len(segments()) == 2
    receiver.open(params, NO_PLACE)
    sender.opened()
    assert segments() == []
    handle = sender.put(0, list(TENSORS.values()))
    assert torch.equal(receiver.receive(METAS, handle)[0][1], TENSORS["float32"])


def test_opening_again_replaces_the_ring(sender: ShmSender) -> None:
    """An engine that joined late gets a ring that it can still open."""
    sender.open(64, ALONE)
    sender.opened()
    receiver = make_receiver("shm")
    receiver.open(sender.open(room(), ALONE), NO_PLACE)
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


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (b"", "ShmInit"),
        (b"\xc1", "ShmInit"),
        (encode(ShmInit(("wavebus-not-there",), 64)), "one host"),
        (encode({"segments": ["../etc/passwd"], "segment_bytes": 64}), "segments"),
        (encode({"segments": ["wavebus-../x"], "segment_bytes": 64}), "segments"),
        (encode({"segments": [], "segment_bytes": 64}), "segments"),
        (encode({"segments": ["wavebus-x"], "segment_bytes": 0}), "segment_bytes"),
    ],
)
def test_bad_params_are_refused(params: bytes, word: str) -> None:
    """The blob is typed and bounded, and a name can't leave the folder."""
    with pytest.raises(EngineError, match=word) as refused:
        make_receiver("shm").open(params, NO_PLACE)
    assert refused.value.code is NackCode.TRANSFER_FAILED


def test_bad_handles_are_refused(sender: ShmSender) -> None:
    """A handle that points outside the ring or a segment names what is wrong."""
    receiver = make_receiver("shm")
    receiver.open(sender.open(room(), ALONE), NO_PLACE)
    meta = meta_of("w", torch.zeros(4))
    for handle, word in (
        (ShmChunk(2, (0,)), "segment 2"),
        (ShmChunk(0, ()), "0 offsets"),
        (ShmChunk(0, (1 << 40,)), "ends at byte"),
    ):
        with pytest.raises(EngineError, match=word):
            receiver.receive((meta,), encode(handle))
    with pytest.raises(EngineError, match="ShmChunk"):
        receiver.receive((meta,), b"\x90")
