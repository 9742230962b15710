"""The contract over TCP; and what becomes of a communicator that loses somebody."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from bus._weight_transfer import gloo
from bus._weight_transfer.allocation import RankAssignment, World
from bus._weight_transfer.formats import GlooInit, decode, encode
from bus._weight_transfer.gloo import GlooReceiver, GlooSender
from bus._weight_transfer.registry import make_receiver
from bus.errors import EngineError, WavebusError
from bus.messages import NackCode
from tests.contract.transfer_suite import METAS, TENSORS, Ends, TransferContract
from trainer_agent._weights.source import meta_of

LOCAL = "127.0.0.1"


class TestContract(TransferContract):
    """What every backend keeps."""

    backend = "gloo"


def test_every_place_of_a_communicator_gets_the_same() -> None:
    """One broadcast, three receivers."""
    sender = GlooSender()
    receivers = [make_receiver("gloo") for _ in range(3)]
    tensors = list(TENSORS.values())
    params = sender.open(sender.packed_bytes([m.size_bytes for m in METAS]), World(5, 4, LOCAL))
    with ThreadPoolExecutor(4) as threads:
        opening = [
            threads.submit(receiver.open, params, RankAssignment(5, 4, 1 + index))
            for index, receiver in enumerate(receivers)
        ]
        sender.meet()
        for each in opening:
            each.result()
        handle = sender.put(0, tensors)
        receiving = [threads.submit(receiver.receive, METAS, handle) for receiver in receivers]
        sender.transfer(0)
        for received in receiving:
            for (_, got), tensor in zip(received.result(), tensors, strict=True):
                assert torch.equal(got.flatten().float(), tensor.flatten().float())
    for receiver in receivers:
        receiver.close()
    sender.close()


def test_whoever_waits_for_the_others_is_freed_when_the_sender_gives_up() -> None:
    """One of two came, and the sender closes: nobody waits out a timeout."""
    sender, receiver = GlooSender(), make_receiver("gloo")
    params = sender.open(64, World(1, 3, LOCAL))
    failed: list[Exception] = []

    def met() -> None:
        try:
            sender.meet()
        except WavebusError as error:
            failed.append(error)

    meeting = threading.Thread(target=met)
    meeting.start()
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(receiver.open, params, RankAssignment(1, 3, 1))
        point = sender._point
        assert point is not None
        while not point.listener.met:  # the other one is there
            threading.Event().wait(0.01)
        sender.close()
        with pytest.raises(EngineError, match="rank 1 of 3 can't meet the others") as refused:
            opening.result()
    meeting.join()
    assert refused.value.code is NackCode.TRANSFER_FAILED
    assert "not all 2 ends" in str(failed[0])


def test_a_receiver_that_is_gone_breaks_the_broadcast_at_once() -> None:
    ends = Ends("gloo")
    ends.open(64)
    ends.receiver.close()
    ends.sender.put(0, [torch.ones(4)])
    with pytest.raises(WavebusError, match="the broadcast of chunk 0 broke"):
        ends.sender.transfer(0)
    ends.close()


def test_an_end_whose_broadcast_breaks_says_who_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo tells of a connection that was reset before the barrier tells of the death."""
    monkeypatch.setattr(gloo, "_LOSS_S", 60.0)
    ends = Ends("gloo")
    ends.open(64)
    assert isinstance(ends.sender, GlooSender)
    assert isinstance(ends.receiver, GlooReceiver)
    communicator, dying = ends.sender._communicator, ends.receiver._communicator
    assert communicator is not None
    assert dying is not None
    gone = dying.close

    class Reset:
        def broadcast(self, *_: object) -> None:
            gone()
            raise RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer")

    communicator._group = Reset()
    dying._barrier.announce(60, 60)
    ends.sender.put(0, [torch.ones(4)])
    with pytest.raises(WavebusError, match=r"chunk 0 broke: rank 1 \(.*\) is closed or gone"):
        ends.sender.transfer(0)
    ends.close()


def test_a_sender_that_is_gone_fails_the_receive_at_once() -> None:
    ends = Ends("gloo")
    ends.open(64)
    handle = ends.sender.put(0, [torch.ones(4)])
    ends.sender.close()
    meta = meta_of("w", torch.ones(4))
    with pytest.raises(EngineError, match="the broadcast broke") as broken:
        ends.receiver.receive((meta,), handle)
    assert ".cc" not in broken.value.detail, "where in gloo it happened is no news"
    assert broken.value.code is NackCode.TRANSFER_FAILED
    with pytest.raises(EngineError, match="not open"):
        ends.receiver.receive((meta,), handle)
    ends.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"port": 0}, "port"),
        ({"barrier_port": 0}, "barrier_port"),
        ({"token": b""}, "token"),
        ({"host": ""}, "host"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"buffers": 17}, "buffers"),
    ],
)
def test_params_out_of_bounds_are_refused_by_field(change: dict[str, object], told: str) -> None:
    fields = {
        "host": LOCAL,
        "port": 1,
        "barrier_port": 2,
        "token": bytes(16),
        "chunk_bytes": 64,
        "buffers": 2,
        "timeout_ms": 1000,
        **change,
    }
    with pytest.raises(EngineError, match=told):
        make_receiver("gloo").open(encode(fields), RankAssignment(1, 2, 1))


def test_a_port_where_nobody_listens_is_named() -> None:
    sender = GlooSender()
    init = decode(sender.open(64, World(1, 2, LOCAL)), GlooInit)
    sender.close()
    with pytest.raises(EngineError, match=f"{LOCAL}:{init.port}"):
        make_receiver("gloo").open(encode(replace(init, timeout_ms=1000)), RankAssignment(1, 2, 1))


def test_a_broadcast_of_another_size_is_refused_before_it_begins() -> None:
    """A receiver that joined it would leave the others with half of it."""
    ends = Ends("gloo")
    ends.open(64)
    handle = ends.sender.put(0, [torch.ones(4)])
    with pytest.raises(EngineError, match="a broadcast of 64 bytes for tensors that take 128"):
        ends.receiver.receive((meta_of("w", torch.ones(17)),), handle)
    ends.close()
